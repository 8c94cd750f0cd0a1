// What decisions on the host need to know of a GPU. No CUDA header: plans are computed and tested on any machine.
#pragma once

#include <string>

namespace dspattn::cuda {

struct DeviceFacts {
  bool present = false;
  std::string absence = {};  // why not: no driver, no such index
  int major = 0;             // compute capability
  int minor = 0;
  int multiprocessors = 0;
  int shared_bytes = 0;  // a CTA may ask for
};

// Cached per device; never throws. A machine without a driver has no device.
const DeviceFacts& device_facts(int index);

}  // namespace dspattn::cuda
