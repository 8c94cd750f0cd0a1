// Exponentials of which only sums count (tile/coarse_exp2.h), against doubles, over all arguments there are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/half.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/tile/coarse_exp2.h"

namespace {

using namespace dspattn;

// 2^x of the phase, from both halves.
template <int kPhase>
double coarse(std::uint16_t x) {
  const std::uint32_t word = cuda::tile::coarse_exp2<kPhase>(x | std::uint32_t{x} << 16);
  EXPECT_EQ(word & 0xFFFFu, word >> 16) << x;
  return core::decode_f16(static_cast<std::uint16_t>(word)) *
         core::decode_f16(static_cast<std::uint16_t>(cuda::tile::kCoarseFactor<kPhase>));
}

// Calls visit(x, 2^x, the four phases' numbers) for every fp16 number that may come: weights of pruned keys are
// below 2^6.
template <typename Visit>
void each_argument(Visit visit) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const auto x = static_cast<std::uint16_t>(bits);
    const double value = core::decode_f16(x);
    if (!(value < 6) || !std::isfinite(value)) continue;
    visit(value, std::exp2(value), coarse<0>(x), coarse<1>(x), coarse<2>(x), coarse<3>(x));
  }
}

TEST(CoarseExp2, OneNumberIsWithinFivePercent) {
  double least = 2, most = 0;
  each_argument([&](double x, double power, double a, double b, double c, double d) {
    if (x < -22) return;
    for (const double one : {a, b, c, d}) {
      least = std::min(least, one / power);
      most = std::max(most, one / power);
    }
  });
  // (1 + f) / 2^f is 1 to 1.0615, 1.0381 of which is taken out; arguments are rounded to 1/64 of an octave.
  EXPECT_GT(least, 0.955);
  EXPECT_LT(most, 1.030);
}

TEST(CoarseExp2, TheMeanOfFourIsWithinOnePercent) {
  each_argument([&](double x, double power, double a, double b, double c, double d) {
    if (x >= -22) {
      EXPECT_NEAR((a + b + c + d) / 4 / power, 1, 0.0105) << x;
    }
  });
}

TEST(CoarseExp2, IntegersAreWhatTheyAre) {
  each_argument([&](double x, double power, double a, double b, double c, double d) {
    if (x == std::floor(x) && x >= -22) {
      EXPECT_NEAR((a + b + c + d) / 4 / power, 1, 3e-4) << x;
    }
  });
}

TEST(CoarseExp2, SmallOnesFadeAndMaskedOnesAreZero) {
  each_argument([&](double x, double power, double a, double b, double c, double d) {
    for (const double one : {a, b, c, d}) {
      EXPECT_GE(one, 0) << x;
      EXPECT_LE(one, 1.03 * std::max(power, 0x1p-23)) << x;
      if (x <= -25) {
        EXPECT_EQ(one, 0) << x;
      }
    }
  });
}

}  // namespace
