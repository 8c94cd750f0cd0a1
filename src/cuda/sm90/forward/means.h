// rest = mean: the forward's warp that writes the means of V, where no kernel before has.
#pragma once

#include "cuda/blocks/means_writer.h"
#include "cuda/sm90/common/params.h"

namespace dspattn::cuda::sm90 {

// By a whole warp of the producer; where others write the means it has no tasks.
template <typename C>
__device__ __forceinline__ void write_means(const ForwardParams& params) {
  MeansWriter<C::kType, C::kMeansInFlight> writer(params.own_means, params.means, params.v, params.out.columns,
                                                  C::kHeadDim);
#pragma unroll 1
  while (writer.work()) {
  }
}

}  // namespace dspattn::cuda::sm90
