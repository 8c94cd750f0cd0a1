// Hints to the L2 cache.
#pragma once

namespace dspattn::cuda::ptx {

// Brings the 128 bytes that `address` lies in to the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace dspattn::cuda::ptx
