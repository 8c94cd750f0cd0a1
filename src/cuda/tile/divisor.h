// Division by a number that is known before the kernel starts, as a multiplication: a plain one takes about 25
// instructions, each of which waits for the one before.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/tile/key_map.h"

namespace dspattn::cuda::tile {

// Of numbers from 0 to 2^31 - 1, by 1 to 2^31 - 1. With s = ceil(log2(value)) and m = ceil(2^(31 + s) / value),
// m * value exceeds 2^(31 + s) by less than value <= 2^s; times n < 2^31 that stays below 2^(31 + s), so that
// n * m / 2^(31 + s), rounded down, is exact. m has 32 bits.
struct Divisor {
  int value = 1;
  int shift = 0;
  std::uint32_t multiplier = 1u << 31;

  constexpr Divisor() = default;
  explicit constexpr Divisor(int by)
      : value(by),
        shift(static_cast<int>(std::bit_width(static_cast<std::uint32_t>(by) - 1))),
        multiplier(
            static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift)) + static_cast<std::uint64_t>(by) - 1) /
                                       static_cast<std::uint64_t>(by))) {}

  DSPATTN_HOST_DEVICE constexpr int quotient(int n) const {
    // Twice n: the product's high word then needs no shift by 31.
    return static_cast<int>((std::uint64_t{2u * static_cast<std::uint32_t>(n)} * multiplier >> 32) >> shift);
  }
  DSPATTN_HOST_DEVICE constexpr int remainder(int n) const { return n - quotient(n) * value; }
};

}  // namespace dspattn::cuda::tile
