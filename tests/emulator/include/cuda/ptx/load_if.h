// In place of src/cuda/ptx/load_if.h.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"

namespace dspattn::cuda::ptx {

inline std::uint32_t load_shared_if(std::uint32_t address, std::uint32_t condition) {
  return condition != 0 ? load_shared(address) : 0;
}

}  // namespace dspattn::cuda::ptx
