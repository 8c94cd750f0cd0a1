// Nothing is executed here: limits to what the compiler may move.
#pragma once

#include <cstdint>

namespace dspattn::cuda::ptx {

// What reads the accumulators stays behind the wait before this point.
template <int kCount>
__device__ __forceinline__ void pin_accumulators(float (&acc)[kCount]) {
#pragma unroll
  for (float& value : acc) asm volatile("" : "+f"(value)::"memory");
}

// The compiler may not move the computation of `value` past this point.
__device__ __forceinline__ void pin(std::uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }

// A lane's value, for good: what comes from another lane, be it the lane itself, the compiler cannot compute anew where
// it is used, and keeps. All lanes of the warp take part.
__device__ __forceinline__ std::uint32_t held(std::uint32_t value) {
  return __shfl_sync(~0u, value, static_cast<int>(threadIdx.x & 31));
}

// The same value under a name the compiler knows nothing of: what is computed from it is computed here, not hoisted out
// of a loop into registers that the loop needs.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace dspattn::cuda::ptx
