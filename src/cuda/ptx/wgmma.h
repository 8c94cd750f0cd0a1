// Ordering and operand descriptors of wgmma (PTX ISA, "Asynchronous warpgroup level matrix instructions").
#pragma once

#include <cstdint>

#include "cuda/ptx/pin.h"

namespace dspattn::cuda::ptx {

// Before the first wgmma of a batch: registers it reads or accumulates into are written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kPending committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The low word of a shared-memory matrix descriptor: start address and leading byte offset, both in units of 16 bytes.
// Adding (bytes >> 4) to it moves the start. In a cluster the upper bits of an address tell whose memory it is.
__device__ __forceinline__ std::uint32_t descriptor_low(std::uint32_t address, std::uint32_t leading_bytes) {
  return ((address & 0x3FFFF) >> 4) | ((leading_bytes >> 4) << 16);
}

// The whole descriptor of a 128-byte-swizzled tile whose rows lie 128 bytes apart: the high word says swizzle mode 1
// (bits 63:62) and 1024 bytes between groups of eight rows (bits 45:32, in units of 16).
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t low) {
  std::uint64_t value;
  asm("mov.b64 %0, {%1, %2};" : "=l"(value) : "r"(low), "n"(0x40000040));
  return value;
}

// The descriptor of a tile that is eight rows of 16 bytes over and over: no swizzle, and no bytes between one eight and
// the next, either way.
__device__ __forceinline__ std::uint64_t descriptor_of_eight_rows(std::uint32_t low) { return low; }

}  // namespace dspattn::cuda::ptx
