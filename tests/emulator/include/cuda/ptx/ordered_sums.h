// Sums in global memory, emulated. CTAs run one after the other: a count that no thread of the same CTA (or of those
// beside it) will reach never will be reached.
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
  emulator::Machine& machine = emulator::Machine::get();
  while (*counter < least) {
    machine.wait(machine.counts(), "a count, of", static_cast<std::uint32_t>(least),
                 static_cast<std::uint32_t>(*counter));
  }
}

inline std::int32_t count_up_now(std::int32_t* counter) {
  emulator::Machine& machine = emulator::Machine::get();
  machine.wake(machine.counts());
  return (*counter)++;
}
inline void count_up(std::int32_t* counter) { count_up_now(counter); }

}  // namespace dspattn::cuda::ptx
