// Rows whose scores are so large that fp32 cannot hold their log-sum-exp: biases of the lowest number leave them.
//
// Beyond 2^15 neighbouring fp16 numbers are 32 apart, in units of which a weight falls by 2^46 or more (exp2_scale is
// at least log2 e): the weights of such a row are those of its largest score, all the same, and zeros. So its
// log-sum-exp is that score's and the logarithm of how many there are. It has lost its last digits, to 2^-7 and less in
// base 2, which is half a percent of every weight; but a few keys can still be counted by it.
#pragma once

#include <cmath>

#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

// What the weights 2^(score * exp2_scale - lse * log2 e) of a row must be multiplied by to add up to 1.
DSPATTN_HOST_DEVICE inline float coarse_correction(float lse, float exp2_scale) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr double kApart = 32, kFirst = 32768;
  const double lse_log2 = double{lse} * 1.4426950408889634;
  if (!(std::fabs(lse_log2) >= kFirst * exp2_scale) || std::isinf(lse)) return 1;
  constexpr double kSlack = 0.05;  // more than the last digits that are lost
  const double top = std::floor((lse_log2 + kSlack) / (kApart * exp2_scale)) * kApart;
  const double counted = std::exp2(lse_log2 - top * exp2_scale);
  constexpr double kCountable = 32;  // what is lost is less than half of one
  const double keys = counted < kCountable ? std::fmax(std::rint(counted), 1.0) : counted;
  const float weight = std::exp2(std::fma(static_cast<float>(top), exp2_scale, -(lse * kLog2E)));
  return static_cast<float>(1 / (keys * weight));
}

}  // namespace dspattn::cuda::tile
