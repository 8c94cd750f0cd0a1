// wgmma on 16-bit types, emulated.
#pragma once

#include <cstdint>

#include "dspattn/dtype.h"
#include "emulator/tensor_core.h"

namespace dspattn::cuda::ptx {

template <DType kType, int kCount>
void wgmma_dense_any(float (&d)[kCount], const std::uint32_t (&a)[4], std::uint64_t b, bool accumulate) {
  emulator::issue({.type = kType, .columns = 2 * kCount, .accumulate = accumulate, .b_descriptor = b},
                  {.accumulators = d, .a = {a[0], a[1], a[2], a[3]}});
}
template <DType kType, int kCount>
void wgmma_dense_any(float (&d)[kCount], std::uint64_t a, std::uint64_t b, bool accumulate) {
  emulator::issue({.type = kType,
                   .columns = 2 * kCount,
                   .accumulate = accumulate,
                   .a_in_shared = true,
                   .a_descriptor = a,
                   .b_descriptor = b},
                  {.accumulators = d});
}

template <DType kType, int kCount, typename A>
void wgmma_dense_first(float (&d)[kCount], const A& a, std::uint64_t b) {
  wgmma_dense_any<kType>(d, a, b, false);
}
template <DType kType, int kCount, typename A>
void wgmma_dense(float (&d)[kCount], const A& a, std::uint64_t b) {
  wgmma_dense_any<kType>(d, a, b, true);
}

template <DType kType, int kMetadataPair, int kCount>
void wgmma_sparse(float (&d)[kCount], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                  std::uint64_t b, std::uint32_t metadata, int accumulate) {
  emulator::issue({.type = kType,
                   .columns = 2 * kCount,
                   .sparse = true,
                   .metadata_pair = kMetadataPair,
                   .accumulate = accumulate != 0,
                   .b_descriptor = b,
                   .b_rows_are_depth = true},
                  {.accumulators = d, .a = {a0, a1, a2, a3}, .metadata = metadata});
}

template <DType kType>
void wgmma_sparse_stored(float (&d)[32], std::uint64_t a, std::uint64_t b, std::uint32_t metadata) {
  emulator::issue({.type = kType,
                   .columns = 64,
                   .sparse = true,
                   .accumulate = true,
                   .a_in_shared = true,
                   .a_descriptor = a,
                   .b_descriptor = b,
                   .b_rows_are_depth = true},
                  {.accumulators = d, .metadata = metadata});
}

}  // namespace dspattn::cuda::ptx
