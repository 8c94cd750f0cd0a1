// wgmma on tf32, emulated.
#pragma once

#include <cstdint>

#include "cuda/ptx/wgmma_shapes.h"

namespace dspattn::cuda::ptx {

template <int kCount, typename A>
void wgmma_tf32_first(float (&d)[kCount], const A& a, std::uint64_t b) {
  wgmma_dense_any<DType::f32>(d, a, b, false);
}
template <int kCount, typename A>
void wgmma_tf32(float (&d)[kCount], const A& a, std::uint64_t b) {
  wgmma_dense_any<DType::f32>(d, a, b, true);
}

template <int kMetadataPair, int kCount>
void wgmma_tf32_sparse(float (&d)[kCount], const std::uint32_t* a, std::uint64_t b, std::uint32_t metadata,
                       int accumulate) {
  emulator::issue({.type = DType::f32,
                   .columns = 2 * kCount,
                   .sparse = true,
                   .metadata_pair = kMetadataPair,
                   .accumulate = accumulate != 0,
                   .b_descriptor = b},
                  {.accumulators = d, .a = {a[0], a[1], a[2], a[3]}, .metadata = metadata});
}

inline void wgmma_tf32_sparse_stored(float (&d)[32], std::uint64_t a, std::uint64_t b, std::uint32_t metadata) {
  emulator::issue({.type = DType::f32,
                   .columns = 64,
                   .sparse = true,
                   .accumulate = true,
                   .a_in_shared = true,
                   .a_descriptor = a,
                   .b_descriptor = b},
                  {.accumulators = d, .metadata = metadata});
}

}  // namespace dspattn::cuda::ptx
