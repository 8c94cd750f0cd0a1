// Asks for memory ahead of time.
#pragma once

namespace dspattn::cuda::ptx {

// The line of global memory with this address, into the L2 cache. Does not wait.
__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace dspattn::cuda::ptx
