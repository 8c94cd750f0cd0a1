// CTAs of a grid that run side by side wait for each other.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <utility>

namespace dspattn::cuda::ptx {

// A barrier of all threads of a grid that launch_cooperatively() has launched: who arrives waits later, with what it
// was given. What was written before the one is seen after the other.
__device__ __forceinline__ unsigned arrive_at_grid() { return cooperative_groups::this_grid().barrier_arrive(); }
__device__ __forceinline__ void await_grid(unsigned arrival) {
  cooperative_groups::this_grid().barrier_wait(std::move(arrival));
}

// By one thread of a CTA, after a barrier of it: whether it is the last of `count` that arrive at a counter, which was
// 0. The last one, and after another barrier its CTA, sees what the others' CTAs have written.
__device__ __forceinline__ bool arrives_last(unsigned* counter, unsigned count) {
  unsigned before = 0;
#if __CUDA_ARCH__ >= 700
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
#endif
  return before == count - 1;
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
