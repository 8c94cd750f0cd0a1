// Fences between a thread's own accesses to global memory and the copies by TMA that it asks for.
#pragma once

namespace dspattn::cuda::ptx {

// What other threads have written to global memory, and this one has seen through a count, becomes visible to the
// copies by TMA that it asks for.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace dspattn::cuda::ptx
