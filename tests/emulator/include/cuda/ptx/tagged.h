// What CTAs tell each other through global memory, emulated: accesses happen at once. Blocks run one after the other,
// so that the first one waits for the others in vain, or side by side (DSPATTN_EMULATOR_SIDE_BY_SIDE).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "emulator/machine.h"

namespace dspattn::cuda::ptx {

inline constexpr int kPatience = 20;

struct alignas(16) TaggedWords {
  float2 x;
  std::uint64_t tag;
};
inline void store_tagged(void* to, float2 x, std::uint64_t tag) {
  const TaggedWords words{x, tag};
  std::memcpy(to, &words, sizeof words);
}
inline std::uint64_t load_tagged(const void* from, float2& x) {
  TaggedWords words;
  std::memcpy(&words, from, sizeof words);
  x = words.x;
  return words.tag;
}

inline constexpr int kCountBits = 16;
inline void open_counter(std::uint64_t* counter, std::uint64_t tag) {
  if (*counter >> kCountBits != tag >> kCountBits) *counter = tag;
}
inline unsigned arrive_at(std::uint64_t* counter) {
  return static_cast<unsigned>((*counter)++ & ((1u << kCountBits) - 1));
}

}  // namespace dspattn::cuda::ptx
