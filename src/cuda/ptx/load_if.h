// A load that a condition decides on, without a branch: several are then on their way together.
#pragma once

#include <cstdint>

namespace dspattn::cuda::ptx {

// A word of shared memory; 0 where `condition` is.
__device__ __forceinline__ std::uint32_t load_shared_if(std::uint32_t address, std::uint32_t condition) {
  std::uint32_t value;
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.b32 %0, 0; @p ld.shared.b32 %0, [%1];}"
               : "=&r"(value)
               : "r"(address), "r"(condition)
               : "memory");
  return value;
}

}  // namespace dspattn::cuda::ptx
