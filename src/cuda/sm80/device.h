// What launches need to know of the device, and the CUDA calls around them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "dspattn/error.h"

namespace dspattn::cuda::sm80 {

inline void require(cudaError_t code, const std::string& what) {
  if (code != cudaSuccess) throw Error("cuda: " + what + ": " + cudaGetErrorString(code));
}

inline int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  require(cudaDeviceGetAttribute(&value, which, device), "reading a device attribute");
  return value;
}

inline int current_device() {
  int device = 0;
  require(cudaGetDevice(&device), "asking for the current device");
  return device;
}

// Makes a device current, and the previous one again at the end of the scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) : previous_(current_device()) {
    if (device != previous_) require(cudaSetDevice(device), "selecting device " + std::to_string(device));
    changed_ = device != previous_;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

struct LaunchLimits {
  int multiprocessors = 0;
  int shared_bytes = 0;  // a CTA may ask for
};

inline LaunchLimits limits_of_current_device() {
  const int device = current_device();
  return {attribute(cudaDevAttrMultiProcessorCount, device),
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)};
}

// Lets a kernel ask for all the shared memory there is. Always the same number: two threads that launch one kernel with
// different needs must not take the permission from each other.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, const LaunchLimits& limits) {
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_bytes),
          "reserving shared memory");
}

// grid.x of a launch.
inline unsigned grid_of(std::int64_t ctas) {
  constexpr std::int64_t kMaxGrid = (std::int64_t{1} << 31) - 1;
  if (ctas > kMaxGrid) {
    throw Error("batch, heads, n_q: expected at most " + std::to_string(kMaxGrid) + " thread blocks, got " +
                std::to_string(ctas));
  }
  return static_cast<unsigned>(ctas);
}

// Launches `ctas` CTAs of `threads` threads; `what` is what an error says.
template <typename Kernel, typename... Arguments>
void launch(const char* what, Kernel kernel, unsigned ctas, int threads, int shared_bytes, cudaStream_t stream,
            const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  require(cudaLaunchKernelEx(&config, kernel, arguments...), std::string("launching ") + what);
}

}  // namespace dspattn::cuda::sm80
