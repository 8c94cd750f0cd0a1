// The memory of a Device, whichever backend it belongs to.
#pragma once

#include <string>
#include <vector>

#include "core/device_memory.h"
#include "dspattn/attention.h"

namespace dspattn::api {

core::DeviceMemory& memory_of(Device device);

// Names of the GPUs, by device index; empty when there are none.
std::vector<std::string> gpu_names();

}  // namespace dspattn::api
