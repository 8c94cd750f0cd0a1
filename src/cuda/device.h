// What the library asks of the CUDA runtime: which devices there are, and to run on the right one.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "core/kernel_row.h"

namespace dspattn::cuda {

struct DeviceFacts {
  bool present = false;
  std::string absence;  // why not: no driver, no such index
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
};

// Cached per device; never throws. A machine without a driver has no device.
const DeviceFacts& device_facts(int index);

// Throws dspattn::Error that names what was attempted.
void check(cudaError_t error, const char* attempted);

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

}  // namespace dspattn::cuda
