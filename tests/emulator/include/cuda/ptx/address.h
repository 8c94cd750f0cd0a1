// Addresses of shared memory, emulated.
#pragma once

#include "emulator/machine.h"

#define DSPATTN_DYNAMIC_SHARED(name) \
  std::uint8_t* const name = dspattn::emulator::Machine::get().shared(dspattn::emulator::kSharedBase, 0)

namespace dspattn::cuda::ptx {

inline std::uint32_t shared_address(const void* pointer) { return emulator::Machine::get().address_of(pointer); }

}  // namespace dspattn::cuda::ptx
