// Memory of a GPU. In a build without CUDA, memory() throws.
#pragma once

#include <string>
#include <vector>

#include "core/device_memory.h"

namespace dspattn::cuda {

core::DeviceMemory& memory(int device_index);

// Names of the GPUs the process sees, by index; empty without a GPU, a driver or CUDA.
std::vector<std::string> device_names();

}  // namespace dspattn::cuda
