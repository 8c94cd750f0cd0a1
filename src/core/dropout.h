// Which weights dropout drops: a function of the seed, the offset and the weight's place alone, so that forward and
// backward, every kernel and every cut of the work agree.
#pragma once

#include <cstdint>

#include "dspattn/pattern.h"

namespace dspattn::core {

// A 64-bit finaliser: every bit of the result depends on every bit given (the constants are those of splitmix64).
DSPATTN_HOST_DEVICE constexpr std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The random numbers of one row of weights: query `i` of sequence `batch` and head `head`.
struct DropoutRow {
  std::uint32_t state = 0;

  DSPATTN_HOST_DEVICE static constexpr DropoutRow of(std::uint64_t seed, std::uint64_t offset, std::uint32_t batch,
                                                     std::uint32_t head, std::uint32_t i) {
    const std::uint64_t place = static_cast<std::uint64_t>(batch) << 32 | head;
    const std::uint64_t row = mixed(mixed(mixed(seed + 0x9E3779B97F4A7C15u) ^ offset) ^ place) + i;
    return {static_cast<std::uint32_t>(mixed(row) >> 32)};
  }

  // 32 random bits for key j of the sequence. A 32-bit finaliser (multipliers of Ettinger's and Wellons' search for the
  // least bias): a few integer operations, for kernels that ask for every weight.
  DSPATTN_HOST_DEVICE constexpr std::uint32_t bits(std::uint32_t j) const {
    std::uint32_t x = state + j * 0x9E3779B9u;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
  }
};

// A weight is dropped when its bits lie below this: probability * 2^32, and never above 2^32 - 1.
constexpr std::uint32_t dropout_threshold(double probability) {
  const double scaled = probability * 4294967296.0;
  return scaled >= 4294967295.0 ? 0xFFFFFFFFu : static_cast<std::uint32_t>(scaled);
}

}  // namespace dspattn::core
