// Addresses of shared memory as instructions take them.
#pragma once

#include <cstdint>

namespace dspattn::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace dspattn::cuda::ptx
