// Every number that the paper's text states, to the digits it prints. Differences are explained in
// docs/theory_equations.md.
#include <gtest/gtest.h>

#include <cmath>

#include "dspattn/theory.h"
#include "dspattn/theory_monte_carlo.h"

namespace dspattn::theory {
namespace {

constexpr std::int64_t kDim = 64;
constexpr std::int64_t kTile = 128;

TEST(PaperValues, TopkPaysBelow4point5Percent) { EXPECT_NEAR(topk_density_to_win(kDim, kTile), 0.045, 0.0005); }

TEST(PaperValues, SpeedupOfOneOfTwo) {
  EXPECT_DOUBLE_EQ(nm_speedup({1, 2}, kDim, kTile, 32), (64.0 * 64 + 48 * 128) / (57.0 * 64 + 25 * 128));
  EXPECT_DOUBLE_EQ(nm_speedup({2, 4}, kDim, kTile, 16), nm_speedup({1, 2}, kDim, kTile, 32));
}

TEST(PaperValues, TopkMatchesAt2Percent) {
  EXPECT_NEAR(topk_density_matching_nm({1, 2}, kDim, kTile), 0.02, 0.0005);
  const double printed =
      (4.0 * 64 + 3 * 128) * (57.0 * 64 + 25 * 128) / ((64.0 * 64 + 48 * 128) * (64 + 256 + 64 * 128)) -
      (2.0 * 64 + 128) / (64 + 256 + 64 * 128);
  EXPECT_NEAR(topk_density_matching_nm({1, 2}, kDim, kTile), printed, 1e-15);
}

TEST(PaperValues, TopkOvertakesAtSpread7) {
  EXPECT_NEAR(spread_where_topk_overtakes({1, 2}, topk_density_matching_nm({1, 2}, kDim, kTile)), 7.0, 0.05);
  EXPECT_NEAR(one_of_two_quality(7.0, 1.0), 0.9999996, 5e-8);
}

TEST(PaperValues, FixedMatchesAt63PercentOnlyWithTheFractionUpright) {
  EXPECT_NEAR(fixed_density_matching_nm({1, 2}, kDim, kTile), 0.63, 0.005);
  EXPECT_NEAR(fixed_density_matching_nm_as_printed(kDim, kTile), 1.55, 0.005);  // no density at all
}

TEST(PaperValues, OneOfTwoKeeps76PercentAtSpread1) { EXPECT_NEAR(one_of_two_quality(1.0, 1.0), 0.76, 0.005); }

TEST(PaperValues, PerformerFeaturesAndBreakEven) {
  EXPECT_EQ(performer_features(kDim), 266);
  EXPECT_NEAR(performer_break_even_keys(Pattern::dense(), kDim, kTile, 266), 672, 0.5);
  EXPECT_NEAR(performer_break_even_keys({1, 2}, kDim, kTile, 266), 1002, 0.5);
  // With the feature values' write counted, both come later.
  EXPECT_NEAR(performer_break_even_keys(Pattern::dense(), kDim, kTile, 266, FeatureMapCount::complete), 777.5, 0.5);
  EXPECT_NEAR(performer_break_even_keys({1, 2}, kDim, kTile, 266, FeatureMapCount::complete), 1160.5, 0.5);
}

TEST(PaperValues, MemoryOfTheWeightMatrix) { EXPECT_DOUBLE_EQ(weight_memory_ratio({1, 2}, 32), 1.0 / 2 + 1.0 / 16); }

TEST(PaperValues, BoxPlotClaimHoldsOnlyPartly) {
  // "p < 7: 1:2 and 2:4 always better than top-k when s < 0.05": at s = 0.05 top-k overtakes 1:2 from p = 5.6 on.
  EXPECT_NEAR(spread_where_topk_overtakes({1, 2}, 0.05), 5.62, 0.005);
  EXPECT_GT(topk_quality(0.049, 6.5, 1.0), one_of_two_quality(6.5, 1.0));
}

}  // namespace
}  // namespace dspattn::theory
