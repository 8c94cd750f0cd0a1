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

inline float4 load_sum_16(const float* from) { return {from[0], from[1], from[2], from[3]}; }

inline std::int32_t count_now(const std::int32_t* counter) { return *counter; }

inline void add_global(float* to, float a) { *to += a; }

inline void await_count(const std::int32_t* counter, std::int32_t least) {
  if (*counter < least) emulator::Machine::fail("waits for a CTA that has not begun");
}

inline void count_up(std::int32_t* counter) { ++*counter; }

}  // namespace dspattn::cuda::ptx
