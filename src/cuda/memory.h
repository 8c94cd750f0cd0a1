// Memory of a GPU. In a build without CUDA, memory() throws.
#pragma once

#include "core/device_memory.h"

namespace dspattn::cuda {

core::DeviceMemory& memory(int device_index);

}  // namespace dspattn::cuda
