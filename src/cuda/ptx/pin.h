// Nothing is executed here: limits to what the compiler may move.
#pragma once

namespace dspattn::cuda::ptx {

// What reads the accumulators stays behind the wait before this point.
template <int kCount>
__device__ __forceinline__ void pin_accumulators(float (&acc)[kCount]) {
#pragma unroll
  for (float& value : acc) asm volatile("" : "+f"(value)::"memory");
}

}  // namespace dspattn::cuda::ptx
