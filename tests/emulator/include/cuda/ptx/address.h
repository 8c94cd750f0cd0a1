// Addresses of shared memory, emulated.
#pragma once

#include "emulator/machine.h"

#define DSPATTN_DYNAMIC_SHARED(name) std::uint8_t* const name = dspattn::emulator::Machine::get().dynamic_shared(16)
#define DSPATTN_ALIGNED_SHARED(type, name, alignment) \
  type* const name = reinterpret_cast<type*>(dspattn::emulator::Machine::get().dynamic_shared(alignment))

namespace dspattn::cuda::ptx {

inline std::uint32_t shared_address(const void* pointer) { return emulator::Machine::get().address_of(pointer); }

}  // namespace dspattn::cuda::ptx
