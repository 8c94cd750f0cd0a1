// How the checks call a kernel: through the public API with the kernel forced by name, or through a stand-in that tests
// of the checks themselves supply.
#pragma once

#include <functional>
#include <string>

#include "core/device_memory.h"
#include "dspattn/attention.h"

namespace dspattn::check {

struct Runner {
  std::function<void(const ForwardArgs&)> forward;
  std::function<void(const BackwardArgs&)> backward;
};

// Calls the library with these kernels (empty: the library chooses). The workspace has exactly the size asked for, with
// guards around it; writing outside throws Error.
Runner library_runner(core::DeviceMemory& memory, const std::string& forward_kernel,
                      const std::string& backward_kernel);

}  // namespace dspattn::check
