// Sums over the four lanes that share a row, on the tensor core: two numbers of either row are A of a small product,
// and B is one in some columns. One instruction where additions take four; beside the products of a main loop it has to
// wait for these, though, and pays only where they leave the tensor core idle (docs/log/rest.md).
#pragma once

#include <cstdint>

#include "cuda/ptx/pin.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::blocks {

// Numbers that tf32 holds exactly, such as fp16 ones.
struct QuadSums {
  std::uint32_t b[2];  // a quarter: each lane's share of a sum that all four have

  __device__ __forceinline__ static QuadSums of_lane() {
    constexpr std::uint32_t kQuarter = 0x3E800000;
    QuadSums sums{{kQuarter, ptx::held(kQuarter)}};  // else one register is copied to a pair before every product
    ptx::pin(sums.b[0]);
    return sums;
  }
  // To sums[0] and sums[2].
  __device__ __forceinline__ void add(float row0, float row0_too, float row1, float row1_too, float (&sums)[4]) const {
    const std::uint32_t a[4] = {__float_as_uint(row0), __float_as_uint(row1), __float_as_uint(row0_too),
                                __float_as_uint(row1_too)};
    ptx::mma_32_bytes<float>(sums, a, b[0], b[1]);
  }
};

// Where lanes add up their own.
struct NoQuadSums {
  __device__ __forceinline__ static NoQuadSums of_lane() { return {}; }
};

}  // namespace dspattn::cuda::blocks
