// Weights of pruned keys straight from two rows' packed scores, without the unit for exponentials: for sums of many, of
// which alone they are asked for (rest = mean).
//
// A fixed-point number has an exponent above and, below, a mantissa that takes 2^f as 1 + f: 6 % too much in the middle
// of an octave. Errors of one sign would stay in a sum, whatever the other numbers are; so of the four lanes that share
// a row one takes its numbers as they are, the others a quarter, half, three quarters of an octave further up: where an
// octave's errors lie differs, and the mean of the four is 3.8 to 4.2 % too much, wherever a score lies.
#pragma once

#include <cstdint>

#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::tile {

inline constexpr int kCoarseLanes = 4;

// References that this is for: whole numbers, base 2, of at most so much (fp16, twice). A lane's offset, below, has
// then no more bits than fp16 holds.
inline constexpr std::uint32_t kLargestCoarseReference = 0x5F005F00u;  // 448

// The whole numbers next to those: where they lie when 1536 is added, a step of fp16 is 1. NaN stays NaN.
DSPATTN_HOST_DEVICE inline std::uint32_t coarse_reference(std::uint32_t minus) {
  constexpr std::uint32_t k1536 = 0x66006600u;
  return ptx::add_f16x2(ptx::add_f16x2(minus, k1536), k1536 ^ 0x80008000u);
}
// By how many octaves weights relative to the whole number are larger than those relative to `minus` itself: exact.
DSPATTN_HOST_DEVICE inline std::uint32_t coarse_octaves(std::uint32_t minus) {
  return ptx::add_f16x2(coarse_reference(minus), minus ^ 0x80008000u);
}

// From the factor and the summand that make a score the logarithm of its weight, in fp16 twice, to those of
// CoarseWeights, which takes logarithms 64 octaves to 1 and downwards.
inline constexpr std::uint32_t kCoarsePerOctave = 0xA400A400u;  // -2^-6
DSPATTN_HOST_DEVICE inline std::uint32_t coarse_slope(std::uint32_t scale) {
  return ptx::fma_f16x2(scale, kCoarsePerOctave, 0x80008000u);
}
DSPATTN_HOST_DEVICE inline std::uint32_t coarse_offset(std::uint32_t minus, std::uint32_t lane_offset) {
  return ptx::fma_f16x2(minus, kCoarsePerOctave, lane_offset);
}

struct CoarseWeights {
  std::uint32_t slope, offset;

  // Times coarse_unit() these are weights of two rows' scores: all negative, and 0 from a logarithm of -23 - lane / 4
  // down. Weights must be below 2^8; the halves of others disturb each other. Clamped to 1, where a step of fp16 is 1 /
  // 32 of an octave; so those above the six bits that all of 0.5 to 1 have in common are steps downwards, to be taken
  // from 1, which leaves the fp16 number's exponent and mantissa.
  DSPATTN_HOST_DEVICE std::uint32_t weights(std::uint32_t scores) const {
    constexpr std::uint32_t kBorrowed = 0x00080000u;  // by the upper half, of the lower one
    return kBorrowed - (ptx::fma_sat_f16x2(scores, slope, offset) << 5);
  }
};

// lane_offset of lane t of a row's four: 1 - (23 + t / 4) / 64.
DSPATTN_HOST_DEVICE constexpr std::uint32_t coarse_lane_offset(int t) {
  return 0x39203920u - 0x00080008u * static_cast<std::uint32_t>(t);
}

// Minus 2^-8 2^(-t / 4), over the mean of four weights of which the lanes' numbers are (1 + t / 4) 2^(-t / 4): where
// logarithms are whole numbers equal weights sum up to the right number.
DSPATTN_HOST_DEVICE constexpr float coarse_unit(int t) {
  constexpr double kQuarters[kCoarseLanes] = {1, 0.84089641525371454, 0.70710678118654752, 0.59460355750136053};
  constexpr double kMean = (1 + 1.25 * kQuarters[1] + 1.5 * kQuarters[2] + 1.75 * kQuarters[3]) / 4;
  constexpr float kUnits[kCoarseLanes] = {
      static_cast<float>(-0x1p-8 * kQuarters[0] / kMean), static_cast<float>(-0x1p-8 * kQuarters[1] / kMean),
      static_cast<float>(-0x1p-8 * kQuarters[2] / kMean), static_cast<float>(-0x1p-8 * kQuarters[3] / kMean)};
  return t < 2 ? (t == 0 ? kUnits[0] : kUnits[1]) : (t == 2 ? kUnits[2] : kUnits[3]);
}

}  // namespace dspattn::cuda::tile
