// The memory of a Device, whichever backend it belongs to.
#pragma once

#include "core/device_memory.h"
#include "dspattn/attention.h"

namespace dspattn::api {

core::DeviceMemory& memory_of(Device device);

}  // namespace dspattn::api
