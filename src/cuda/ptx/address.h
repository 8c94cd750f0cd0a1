// Addresses of shared memory as instructions take them.
#pragma once

#include <cstdint>

// Declares the block's dynamic shared memory, of bytes. A macro, because the compiler writes other code around a
// pointer that a function returns.
#define DSPATTN_DYNAMIC_SHARED(name) extern __shared__ std::uint8_t name[]
// The same as elements of a type, aligned.
#define DSPATTN_ALIGNED_SHARED(type, name, alignment) \
  extern __shared__ __align__(alignment)              \
  type name[]

namespace dspattn::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace dspattn::cuda::ptx
