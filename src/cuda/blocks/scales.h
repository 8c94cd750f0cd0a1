// The numbers that turn a score product into selection keys and weights (docs/notation.md), part of a kernel's
// parameters.
#pragma once

#include <cstdint>

namespace dspattn::cuda::blocks {

struct ScoreScales {
  std::uint32_t q_scale = 0;          // 2^-e in the inputs' type, twice: scores times this are compared, in fp16
  float exp2_scale = 1;               // from those to base-2 logarithms of weights: scale * 2^e * log2(e)
  std::uint32_t exp2_scale_half = 0;  // the same in fp16, twice: where exponentials are taken in fp16
  float exp2_scale_ratio = 1;         // of the two
  float bias_scale = 1;               // from a bias to the compared scores: 2^-e / scale

  // A factor and a summand that change nothing; the compiler does not know, and must not.
  float opaque_one = 1;
  std::uint32_t opaque_zero = 0;
};

}  // namespace dspattn::cuda::blocks
