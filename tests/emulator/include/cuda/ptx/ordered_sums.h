// Sums in global memory, emulated. CTAs run one after the other: a count that has not been reached never will be.
#pragma once

#include <cstdint>

#include "emulator/machine.h"

namespace dspattn::cuda::ptx {

inline void add_global_16(float* to, float a, float b, float c, float d) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0) {
    emulator::Machine::fail("16 bytes added to an address that is not aligned");
  }
  to[0] += a;
  to[1] += b;
  to[2] += c;
  to[3] += d;
}

inline void await_count(const std::int32_t* counter, std::int32_t least) {
  if (*counter < least) emulator::Machine::fail("waits for a CTA that has not begun");
}

inline void count_up(std::int32_t* counter) { ++*counter; }

}  // namespace dspattn::cuda::ptx
