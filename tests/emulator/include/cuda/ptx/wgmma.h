// Ordering and operand descriptors of wgmma, emulated.
#pragma once

#include <cstdint>

#include "cuda/ptx/pin.h"
#include "emulator/tensor_core.h"

namespace dspattn::cuda::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit_products(); }
template <int kPending>
void wgmma_wait() {
  emulator::await_products(kPending);
}

inline std::uint32_t descriptor_low(std::uint32_t address, std::uint32_t leading_bytes) {
  return ((address & 0x3FFFF) >> 4) | ((leading_bytes >> 4) << 16);
}
inline std::uint64_t descriptor(std::uint32_t low) { return std::uint64_t{0x40000040} << 32 | low; }

inline std::uint64_t descriptor_of_eight_rows(std::uint32_t low) { return low; }

}  // namespace dspattn::cuda::ptx
