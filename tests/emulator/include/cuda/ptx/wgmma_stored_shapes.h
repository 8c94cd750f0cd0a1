// wgmma on 16-bit types with both operands in shared memory, or A in registers, emulated.
#pragma once

#include <cstdint>

#include "dspattn/dtype.h"
#include "emulator/tensor_core.h"

namespace dspattn::cuda::ptx {

template <DType kType, int kDepthRowsA, int kDepthRowsB, int kCount>
void wgmma_stored_any(float (&d)[kCount], std::uint64_t a, std::uint64_t b, bool accumulate) {
  emulator::issue({.type = kType,
                   .columns = 2 * kCount,
                   .accumulate = accumulate,
                   .a_in_shared = true,
                   .a_rows_are_depth = kDepthRowsA != 0,
                   .a_descriptor = a,
                   .b_descriptor = b,
                   .b_rows_are_depth = kDepthRowsB != 0},
                  {.accumulators = d});
}

template <DType kType, int kDepthRowsA, int kDepthRowsB, int kCount>
void wgmma_stored_first(float (&d)[kCount], std::uint64_t a, std::uint64_t b) {
  wgmma_stored_any<kType, kDepthRowsA, kDepthRowsB>(d, a, b, false);
}
template <DType kType, int kDepthRowsA, int kDepthRowsB, int kCount>
void wgmma_stored(float (&d)[kCount], std::uint64_t a, std::uint64_t b) {
  wgmma_stored_any<kType, kDepthRowsA, kDepthRowsB>(d, a, b, true);
}

template <DType kType, int kCount>
void wgmma_gradient(float (&d)[kCount], const std::uint32_t* a, std::uint64_t b) {
  emulator::issue(
      {.type = kType, .columns = 2 * kCount, .accumulate = true, .b_descriptor = b, .b_rows_are_depth = true},
      {.accumulators = d, .a = {a[0], a[1], a[2], a[3]}});
}

template <DType kType, int kCount>
void wgmma_gradient_stored(float (&d)[kCount], std::uint64_t a, std::uint64_t b, int accumulate) {
  wgmma_stored_any<kType, 0, 1>(d, a, b, accumulate != 0);
}

}  // namespace dspattn::cuda::ptx
