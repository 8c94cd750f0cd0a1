// How a fused kernel is launched: what every instance (instance.cu.in) needs.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/kernel.h"
#include "cuda/sm90/fused/launch.h"
#include "cuda/sm90/fused/params.h"

namespace dspattn::cuda::sm90 {

template <typename C>
cudaError_t launch(const FusedParams& params, int blocks, cudaStream_t stream) {
  // Shared memory beyond 48 KiB must be asked for, per device; the call is cheap and allowed during graph capture.
  const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(&fused_forward<C>),
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<C>);
  if (error != cudaSuccess) return error;
  // It may start while the kernel before, which may write the schedule, still runs: it waits for that itself.
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (params.schedule != nullptr || params.alike != 0) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (params.pairs != 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {2, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = kSharedBytes<C>;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, &fused_forward<C>, params);
}

template <typename C>
Launcher launcher_of() {
  return {C::kTileQ, C::kTileK, &launch<C>, C::kPairs};
}

}  // namespace dspattn::cuda::sm90
