// CTAs of a grid that are all resident wait for each other, at a counter in global memory.
#pragma once

#include <cuda_runtime.h>

namespace dspattn::cuda::ptx {

// By one thread, after a barrier of its CTA: what the CTA has written is seen by whoever sees the arrival.
__device__ __forceinline__ void arrive_at(unsigned* counter) {
#if __CUDA_ARCH__ >= 700
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
#endif
}
// Until so many have arrived; then a barrier tells the thread's CTA.
__device__ __forceinline__ void await_arrivals(const unsigned* counter, unsigned count) {
#if __CUDA_ARCH__ >= 700
  unsigned arrived = 0;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
  } while (arrived < count);
#endif
}

// Launches a kernel when there is room for all of its CTAs.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_cooperatively(const cudaLaunchConfig_t& config, void (*kernel)(Parameters...),
                                 const Arguments&... arguments) {
  constexpr unsigned kMost = 4;
  cudaLaunchAttribute attributes[kMost] = {};
  cudaLaunchConfig_t all = config;
  if (config.numAttrs >= kMost) return cudaErrorInvalidValue;
  for (unsigned i = 0; i < config.numAttrs; ++i) attributes[i] = config.attrs[i];
  attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
  attributes[config.numAttrs].val.cooperative = 1;
  all.attrs = attributes;
  all.numAttrs = config.numAttrs + 1;
  return cudaLaunchKernelEx(&all, kernel, arguments...);
}

}  // namespace dspattn::cuda::ptx
