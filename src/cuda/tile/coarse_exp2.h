// A power of two near 2^x, of two fp16 numbers at once, without the unit that computes exponentials.
#pragma once

#include <cstdint>

#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::tile {

// 2^round(x) over 2^x, its mean for fractions spread evenly: the integral of 2^-r from -1/2 to 1/2.
inline constexpr float kCoarseExcess = 1.0201394f;

// 2^round(x) of each half for x up to 16, ties to odd; 0 for x below -14.5. Between 1024 and 2048 fp16's step is 1, so
// that adding 1536 + 15, fp16's exponent bias, rounds x and leaves the result's exponent in the last bits.
DSPATTN_HOST_DEVICE inline std::uint32_t coarse_exp2_f16x2(std::uint32_t x) {
  constexpr std::uint32_t kBias = 0x660F660Fu;   // 1551 twice
  constexpr std::uint32_t kLeast = 0x66006600u;  // 1536 twice
  const std::uint32_t rounded = ptx::max_f16x2(ptx::add_f16x2(x, kBias), kLeast);
  return (rounded - kLeast) * 1024u;  // to the exponents' place, both halves at once
}

}  // namespace dspattn::cuda::tile
