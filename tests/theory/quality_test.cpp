// Q^p: the definition, the closed forms against experiments, and the step from finite to long rows.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "dspattn/error.h"
#include "dspattn/theory.h"
#include "theory/interval.h"

namespace dspattn::theory {
namespace {

TEST(QualityDefinition, IsTheMeanOverRowsOfTheKeptShare) {
  const std::vector<double> weights = {0.5, 0.25, 0.25, 0.0, 0.1, 0.2, 0.3, 0.4};
  const std::vector<std::uint8_t> kept = {1, 0, 0, 1, 0, 0, 1, 1};
  EXPECT_DOUBLE_EQ(quality(weights, kept, 4, 1.0), (0.5 + 0.7) / 2);
  EXPECT_DOUBLE_EQ(quality(weights, kept, 4, 2.0), (0.25 / 0.375 + 0.25 / 0.30) / 2);
  EXPECT_DOUBLE_EQ(density(kept), 0.5);
}

TEST(QualityDefinition, LeavesEmptyRowsOut) {
  const std::vector<double> weights = {0.5, 0.5, 0.0, 0.0};
  const std::vector<std::uint8_t> kept = {1, 0, 1, 0};
  EXPECT_DOUBLE_EQ(quality(weights, kept, 2, 1.0), 0.5);
}

// The ratio of two means, where both have a usable variance: a = p sigma up to 1.5.
class LongRows : public testing::TestWithParam<double> {};

TEST_P(LongRows, NmMatchesTheExperiment) {
  const double p = GetParam();
  std::uint64_t seed = 11;
  for (const Pattern pattern : {Pattern{1, 2}, Pattern{2, 4}, Pattern{1, 4}, Pattern{4, 8}, Pattern{3, 7}}) {
    const RowModel model{.p = p, .sigma = 1.0, .keys = 56};
    const Estimate estimate = simulate_quality(Selection::nm(pattern), model, Average::means, 8000, seed++);
    EXPECT_TRUE(inside(nm_quality(pattern, p, 1.0), estimate)) << to_string(pattern);
    EXPECT_TRUE(narrower_than(0.02, estimate));
  }
}

TEST_P(LongRows, TopkAndFixedMatchTheExperiment) {
  const double p = GetParam();
  std::uint64_t seed = 23;
  for (const double share : {0.02, 0.1, 0.5}) {
    // The threshold of a row of n keys strays from the quantile by O(1/n): 16384 keys keep that below the interval.
    const RowModel model{.p = p, .sigma = 1.0, .keys = 16384};
    const Estimate topk = simulate_quality(Selection::topk(share), model, Average::means, 24, seed++);
    EXPECT_TRUE(inside(topk_quality(share, p, 1.0), topk)) << share;
    EXPECT_TRUE(narrower_than(0.03, topk));
    const Estimate fixed = simulate_quality(Selection::fixed(share), model, Average::means, 24, seed++);
    EXPECT_TRUE(inside(fixed_quality(share), fixed)) << share;
    EXPECT_TRUE(narrower_than(0.05, fixed));
  }
}

TEST_P(LongRows, MeanPowerMatchesTheExperiment) {
  const double p = GetParam();
  const Estimate estimate = simulate_mean_power(p, 0.3, 1.0, 300000, 5);
  EXPECT_TRUE(inside(mean_power(p, 0.3, 1.0), estimate));
  EXPECT_TRUE(narrower_than(0.1 * estimate.mean, estimate));
}

INSTANTIATE_TEST_SUITE_P(Spread, LongRows, testing::Values(0.5, 1.0, 1.5));

// The mean of the ratio, at any spread: it lies in [0, 1], so the interval holds even where the power means diverge.
class FiniteRows : public testing::TestWithParam<double> {};

TEST_P(FiniteRows, NmMatchesTheExperiment) {
  const double p = GetParam();
  std::uint64_t seed = 37;
  for (const Pattern pattern : {Pattern{1, 2}, Pattern{2, 4}, Pattern{1, 4}, Pattern{4, 8}}) {
    const RowModel model{.p = p, .sigma = 1.0, .keys = 64};
    const Estimate estimate = simulate_quality(Selection::nm(pattern), model, Average::ratio, 6000, seed++);
    EXPECT_TRUE(inside(nm_quality_finite(pattern, p, 1.0, 64), estimate)) << to_string(pattern);
    EXPECT_TRUE(narrower_than(0.02, estimate));
  }
}

TEST_P(FiniteRows, TopkMatchesTheExperiment) {
  const double p = GetParam();
  for (const std::int64_t kept : {1, 4, 32}) {
    const RowModel model{.p = p, .sigma = 1.0, .keys = 64};
    const Estimate estimate = simulate_quality(Selection::topk(static_cast<double>(kept) / 64.0), model, Average::ratio,
                                               4000, 41 + static_cast<std::uint64_t>(kept));
    EXPECT_TRUE(inside(topk_quality_finite(kept, p, 1.0, 64), estimate)) << kept;
    EXPECT_TRUE(narrower_than(0.03, estimate));
  }
}

INSTANTIATE_TEST_SUITE_P(Spread, FiniteRows, testing::Values(0.5, 2.0, 4.0, 6.5, 12.0));

TEST(FiniteRows, TendToTheLimitWhenTheSpreadIsSmall) {
  double previous = 1.0;
  for (const std::int64_t keys : {16, 256, 4096}) {
    const double gap = std::abs(nm_quality_finite({2, 4}, 1.0, 1.0, keys) - nm_quality({2, 4}, 1.0, 1.0));
    EXPECT_LT(gap, previous);
    previous = gap;
  }
  EXPECT_LT(previous, 1e-4);
  EXPECT_NEAR(topk_quality_finite(819, 1.0, 1.0, 4096), topk_quality(819.0 / 4096.0, 1.0, 1.0), 1e-3);
}

// One group that is the whole row, one pair: E[max/(max+min)] by a plain two-dimensional sum.
TEST(FiniteRows, OfOnePairMatchesDirectIntegration) {
  const double a = 2.0;
  double sum = 0.0;
  double mass = 0.0;
  for (double x = -8; x <= 8; x += 0.02) {
    for (double y = -8; y <= 8; y += 0.02) {
      const double density = std::exp(-0.5 * (x * x + y * y));
      sum += density / (1.0 + std::exp(-a * std::abs(x - y)));
      mass += density;
    }
  }
  EXPECT_NEAR(nm_quality_finite({1, 2}, a, 1.0, 2), sum / mass, 2e-5);  // the kink at x = y costs the plain sum O(h^2)
}

TEST(FiniteRows, ShowWhereTheLimitFails) {
  // p sigma = 7, n = 384: the limit promises a loss of 4e-7; a row of that length loses thousands of times more.
  EXPECT_GT(1.0 - nm_quality_finite({1, 2}, 7.0, 1.0, 384), 1000 * (1.0 - nm_quality({1, 2}, 7.0, 1.0)));
}

TEST(NmQuality, AgreesWithTheClosedFormOfOneOfTwo) {
  for (double p = 0.25; p < 9; p += 0.25) EXPECT_NEAR(nm_quality({1, 2}, p, 1.0), one_of_two_quality(p, 1.0), 1e-14);
}

// 2:4 = 3 (1:3) - 2 (1:4): being second or better of four, by inclusion and exclusion over which other is ignored.
TEST(NmQuality, TwoOfFourFollowsFromOneOfThreeAndOneOfFour) {
  for (double p = 0.5; p < 7; p += 0.5) {
    EXPECT_NEAR(nm_quality({2, 4}, p, 1.0), 3 * nm_quality({1, 3}, p, 1.0) - 2 * nm_quality({1, 4}, p, 1.0), 1e-13);
  }
}

TEST(NmQuality, OrdersThePatternsAsTheyNest) {
  for (double p = 0.5; p < 7; p += 0.5) {
    EXPECT_GT(nm_quality({2, 4}, p, 1.0), two_of_four_quality_lower_bound(p, 1.0));
    EXPECT_GT(nm_quality({4, 8}, p, 1.0), nm_quality({2, 4}, p, 1.0));
    EXPECT_GT(topk_quality(0.5, p, 1.0), nm_quality({16, 32}, p, 1.0));
    EXPECT_LT(nm_quality({1, 4}, p, 1.0), nm_quality({1, 2}, p, 1.0));
  }
  EXPECT_NEAR(nm_quality({2, 4}, 1e-9, 1.0), 0.5, 1e-9);
  EXPECT_DOUBLE_EQ(nm_quality(Pattern::dense(), 1.0, 1.0), 1.0);
}

TEST(NmQuality, DependsOnPTimesSigmaOnly) {
  EXPECT_DOUBLE_EQ(nm_quality({2, 4}, 2.0, 1.5), nm_quality({2, 4}, 1.0, 3.0));
  EXPECT_NEAR(nm_quality_finite({2, 4}, 2.0, 1.5, 64), nm_quality_finite({2, 4}, 1.0, 3.0, 64), 1e-12);
}

TEST(TopkOvertakes, LaterInFiniteRows) {
  constexpr std::int64_t kKeys = 4096, kKept = 83;
  const double spread = spread_where_topk_overtakes_finite({1, 2}, kKept, kKeys);
  const auto topk = [&](double at) { return topk_quality_finite(kKept, at, 1.0, kKeys); };
  const auto pruned = [&](double at) { return nm_quality_finite({1, 2}, at, 1.0, kKeys); };
  EXPECT_LT(topk(spread - 0.01), pruned(spread - 0.01));
  EXPECT_GT(topk(spread + 0.01), pruned(spread + 0.01));
  EXPECT_GT(spread, spread_where_topk_overtakes({1, 2}, static_cast<double>(kKept) / kKeys) + 1.0);
}

TEST(TopkOvertakes, IsWhereTheQualitiesCross) {
  for (const Pattern pattern : {Pattern{1, 2}, Pattern{2, 4}}) {
    const double spread = spread_where_topk_overtakes(pattern, 0.1);
    EXPECT_NEAR(topk_quality(0.1, spread, 1.0), nm_quality(pattern, spread, 1.0), 1e-10);
    EXPECT_LT(topk_quality(0.1, spread - 0.1, 1.0), nm_quality(pattern, spread - 0.1, 1.0));
  }
  EXPECT_GT(spread_where_topk_overtakes({2, 4}, 0.02), spread_where_topk_overtakes({1, 2}, 0.02));
}

}  // namespace
}  // namespace dspattn::theory
