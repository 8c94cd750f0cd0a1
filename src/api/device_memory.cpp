#include "api/device_memory.h"

#include "cuda/device/memory.h"

namespace dspattn::api {

core::DeviceMemory& memory_of(Device device) {
  return device.type == DeviceType::cpu ? core::host_memory() : cuda::memory(device.index);
}

std::vector<std::string> gpu_names() { return cuda::device_names(); }

}  // namespace dspattn::api
