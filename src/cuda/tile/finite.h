// What becomes of 16-bit elements that are not finite where they meet weights of 0, which would make NaN of them.
#pragma once

#include <cstdint>

#include "dspattn/dtype.h"
#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

// Exponent bits of an element, all set where it is not finite.
DSPATTN_HOST_DEVICE constexpr std::uint32_t exponent_bits(DType type) { return type == DType::bf16 ? 0x7F80 : 0x7C00; }

// NaN becomes 0, an infinity `kInfinity`.
enum class Infinity : std::uint8_t { zero, largest };

template <Infinity kInfinity>
DSPATTN_HOST_DEVICE constexpr std::uint32_t finite_element(std::uint32_t element, std::uint32_t exponent) {
  if ((element & exponent) != exponent) return element;
  const bool infinite = (element & 0x7FFF) == exponent;
  return kInfinity == Infinity::largest && infinite ? (element & 0x8000) | (exponent - 1) : 0;
}

// Two of them in a word.
template <Infinity kInfinity>
DSPATTN_HOST_DEVICE constexpr std::uint32_t finite_pair(std::uint32_t pair, DType type) {
  const std::uint32_t exponent = exponent_bits(type);
  return finite_element<kInfinity>(pair & 0xFFFF, exponent) | finite_element<kInfinity>(pair >> 16, exponent) << 16;
}

}  // namespace dspattn::cuda::tile
