// 2^x of two fp16 numbers without the unit for exponentials, for sums of many: the weights of pruned keys, of which
// only the sum counts (rest = mean).
//
// A fixed-point number has an exponent above and, below, a mantissa that takes 2^f as 1 + f: 6 % too much in the middle
// of an octave. Errors of one sign would stay in a sum, whatever the other numbers are; so every fourth number is taken
// as it is, the others a quarter, half, three quarters of an octave further up: where an octave's errors lie differs,
// and the mean of the four is 3.8 to 4.2 % too much, wherever x lies.
#pragma once

#include <cstdint>

#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::tile {

inline constexpr int kCoarsePhases = 4;

// The factor that makes weights of coarse_exp2<kPhase>() those of x, as fp16 twice: 2^-9 2^(-kPhase / 4) / 1.0381, by
// which equal weights of all phases sum up to the right number where x is an integer.
template <int kPhase>
inline constexpr std::uint32_t kCoarseFactor = kPhase == 0   ? 0x17B517B5u
                                               : kPhase == 1 ? 0x167B167Bu
                                               : kPhase == 2 ? 0x15731573u
                                                             : 0x14951495u;

// For x < 6; the halves of others may disturb each other. As subnormal numbers count in steps of 2^-24, so does the sum
// here, in its low bits: 64 an octave, 0 from x = -24 down. Those above six bits are the exponent of an fp16 number
// when they are moved to its place.
template <int kPhase>
DSPATTN_HOST_DEVICE inline std::uint32_t coarse_exp2(std::uint32_t x) {
  constexpr std::uint32_t kStep = 0x00400040u;            // 2^-18: 64 steps
  constexpr std::uint32_t kLowest = 0x06000600u;          // 24 2^-18
  constexpr std::uint32_t kShift = kPhase * 0x00100010u;  // a quarter of an octave in steps
  return ptx::fma_relu_f16x2(x, kStep, kLowest + kShift) << 4;
}

}  // namespace dspattn::cuda::tile
