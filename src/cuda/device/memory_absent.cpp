#include "cuda/device/memory.h"
#include "dspattn/error.h"

namespace dspattn::cuda {

core::DeviceMemory& memory(int) { throw Error("device: expected cpu, got cuda; this build is without CUDA"); }

std::vector<std::string> device_names() { return {}; }

}  // namespace dspattn::cuda
