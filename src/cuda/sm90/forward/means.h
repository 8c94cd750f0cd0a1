// rest = mean: the forward's warp that writes the means of V, where no kernel before has (blocks/means_writer.h): idle,
// or waiting for results to store (full.h).
#pragma once

#include "cuda/blocks/means_writer.h"
#include "cuda/sm90/common/params.h"

namespace dspattn::cuda::sm90 {

// For a whole warp of the producer; the kernel's parameters outlive it.
template <typename C>
__device__ __forceinline__ auto means_writer(const ForwardParams& params) {
  return MeansWriter < C::kType, C::kMeansInFlight,
         C::kFull ? RowsSee::all_keys
                  : RowsSee::anything > (params.own_means, params.means, params.v, params.out.columns, C::kHeadDim);
}

// An idle warp.
template <typename C>
__device__ __forceinline__ void write_means(const ForwardParams& params) {
  means_writer<C>(params).work_until([] { return false; });
}

}  // namespace dspattn::cuda::sm90
