// What the library asks of the CUDA runtime: which devices there are, to run on the right one, and to launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/device/facts.h"

namespace dspattn::cuda {

// Throws dspattn::Error that names what was attempted.
void check(cudaError_t error, const std::string& attempted);

// Makes a device current for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Of the device that is current.
const DeviceFacts& current_device_facts();

// grid.x of a launch; throws where a grid cannot have as many CTAs.
unsigned grid_of(std::int64_t ctas);

// Lets a kernel ask for so much dynamic shared memory: beyond 48 KiB it must, per device. Cheap, and allowed during
// graph capture. Two threads that launch one kernel must say the same number: one would take the other's permission.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "reserving shared memory");
}

struct LaunchShape {
  unsigned ctas = 1;
  int threads = 0;
  int shared_bytes = 0;
  int cluster_ctas = 1;
  bool may_overlap = false;  // with the end of the kernel before, for which it waits itself
};

// `name` is what an error says.
template <typename Kernel, typename... Arguments>
void launch(const char* name, Kernel kernel, const LaunchShape& shape, cudaStream_t stream,
            const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.ctas);
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (shape.may_overlap) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster_ctas > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(shape.cluster_ctas), 1, 1};
  }
  check(cudaLaunchKernelEx(&config, kernel, arguments...), std::string("launching ") + name);
}

}  // namespace dspattn::cuda
