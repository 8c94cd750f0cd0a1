// Traffic formulas against the tile walk, speedups against traffic, densities against speedups.
#include <gtest/gtest.h>

#include "dspattn/theory.h"
#include "dspattn/theory_monte_carlo.h"

namespace dspattn::theory {
namespace {

void expect_equal(const Traffic& formula, const Traffic& counted) {
  EXPECT_DOUBLE_EQ(formula.scores, counted.scores);
  EXPECT_DOUBLE_EQ(formula.softmax, counted.softmax);
  EXPECT_DOUBLE_EQ(formula.values, counted.values);
  EXPECT_DOUBLE_EQ(formula.other, counted.other);
}

// Where every extent is a multiple of the tile, the formulas are the count, to the last element.
constexpr Shape kWhole{.keys = 512, .head_dim = 128, .tile = 64};

TEST(Traffic, FormulasEqualTheCountOnWholeTiles) {
  expect_equal(full_traffic(kWhole), count_full_traffic(kWhole));
  expect_equal(topk_traffic(kWhole, 64.0 / 512.0), count_topk_traffic(kWhole, 64));
  for (const FixedReads reads : {FixedReads::all_values, FixedReads::kept_values}) {
    expect_equal(fixed_traffic(kWhole, 0.25, reads), count_fixed_traffic(kWhole, 128, reads));
  }
  for (const Pattern pattern : {Pattern{1, 2}, Pattern{2, 4}, Pattern{1, 4}, Pattern{4, 8}, Pattern::dense()}) {
    for (const int bits : {16, 32})
      expect_equal(nm_traffic(kWhole, pattern, bits), count_nm_traffic(kWhole, pattern, bits));
  }
}

// d < T: each weight is read once, not d/T times. The formulas count too little, for every mechanism.
TEST(Traffic, FormulasUndercountHeadsNarrowerThanATile) {
  const Shape shape{.keys = 1024, .head_dim = 64, .tile = 128};
  const double weights_read_less = 0.5 * 1024 * 1024;
  EXPECT_DOUBLE_EQ(count_full_traffic(shape).values - full_traffic(shape).values, weights_read_less);
  EXPECT_DOUBLE_EQ(count_nm_traffic(shape, {2, 4}).values - nm_traffic(shape, {2, 4}).values,
                   weights_read_less * 9 / 16);
  EXPECT_DOUBLE_EQ(count_full_traffic(shape).scores, full_traffic(shape).scores);
}

// What docs/theory.md says of whole tiles at d = 64, T = 128: 1.517 for 2:4; top-k wins below 5.2 %, not 4.5 %.
TEST(Traffic, WholeTilesMoveTheBreakEvens) {
  const Shape shape{.keys = 8192, .head_dim = 64, .tile = 128};
  const double full = count_full_traffic(shape).total();
  const double pruned = count_nm_traffic(shape, {2, 4}).total();
  EXPECT_NEAR(full / pruned, 1.517, 0.002);
  const auto topk = [&](double density) {
    return count_topk_traffic(shape, static_cast<std::int64_t>(density * 8192)).total();
  };
  EXPECT_LT(topk(0.0515), full);
  EXPECT_GT(topk(0.0530), full);
  EXPECT_LT(topk(0.0240), pruned);
  EXPECT_GT(topk(0.0246), pruned);
}

TEST(Traffic, DensePatternIsFullAttention) { expect_equal(nm_traffic(kWhole, Pattern::dense()), full_traffic(kWhole)); }

TEST(Speedup, IsTheLimitOfTheTrafficRatio) {
  const Shape longest{.keys = std::int64_t{1} << 30, .head_dim = 64, .tile = 128};
  const double full = full_traffic(longest).total();
  EXPECT_NEAR(topk_speedup_bound(64, 128, 0.1), full / topk_traffic(longest, 0.1).total(), 1e-6);
  EXPECT_NEAR(fixed_speedup(64, 128, 0.3), full / fixed_traffic(longest, 0.3).total(), 1e-6);
  EXPECT_NEAR(fixed_speedup(64, 128, 0.3, FixedReads::kept_values),
              full / fixed_traffic(longest, 0.3, FixedReads::kept_values).total(), 1e-6);
  for (const Pattern pattern : {Pattern{1, 2}, Pattern{2, 4}, Pattern{1, 4}, Pattern{4, 8}}) {
    EXPECT_NEAR(nm_speedup(pattern, 64, 128), full / nm_traffic(longest, pattern).total(), 1e-6);
  }
}

TEST(Density, GivesEqualSpeed) {
  for (const std::int64_t d : {32, 64, 128}) {
    for (const std::int64_t t : {64, 128, 256}) {
      EXPECT_NEAR(topk_speedup_bound(d, t, topk_density_to_win(d, t)), 1.0, 1e-12);
      const double speed = nm_speedup({2, 4}, d, t);
      EXPECT_NEAR(topk_speedup_bound(d, t, topk_density_matching_nm({2, 4}, d, t)), speed, 1e-12);
      for (const FixedReads reads : {FixedReads::all_values, FixedReads::kept_values}) {
        EXPECT_NEAR(fixed_speedup(d, t, fixed_density_matching_nm({2, 4}, d, t, reads), reads), speed, 1e-12);
      }
    }
  }
}

// The densities by counting: 2 % of the density to either side the walks of long rows are in the stated order.
TEST(Density, IsWhereTheWalksCross) {
  const Shape shape{.keys = 16384, .head_dim = 128, .tile = 64};
  const auto n = static_cast<double>(shape.keys);
  const double pruned = count_nm_traffic(shape, {2, 4}).total();
  const double full = count_full_traffic(shape).total();
  const auto topk = [&](double density) {
    return count_topk_traffic(shape, static_cast<std::int64_t>(density * n)).total();
  };
  const double to_win = topk_density_to_win(shape.head_dim, shape.tile);
  EXPECT_LT(topk(0.98 * to_win), full);
  EXPECT_GT(topk(1.02 * to_win), full);
  const double matching = topk_density_matching_nm({2, 4}, shape.head_dim, shape.tile);
  EXPECT_LT(topk(0.98 * matching), pruned);
  EXPECT_GT(topk(1.02 * matching), pruned);
  for (const FixedReads reads : {FixedReads::all_values, FixedReads::kept_values}) {
    const double fixed = fixed_density_matching_nm({2, 4}, shape.head_dim, shape.tile, reads);
    const auto traffic = [&](double density) {
      return count_fixed_traffic(shape, static_cast<std::int64_t>(density * n), reads).total();
    };
    EXPECT_LT(traffic(0.98 * fixed), pruned);
    EXPECT_GT(traffic(1.02 * fixed), pruned);
  }
}

TEST(Metadata, IsOneSixteenthForTheHardwarePatterns) {
  EXPECT_DOUBLE_EQ(metadata_fraction({2, 4}, 16), 1.0 / 16);
  EXPECT_DOUBLE_EQ(metadata_fraction({1, 2}, 32), 1.0 / 16);
  EXPECT_DOUBLE_EQ(metadata_fraction({1, 2}, 16), 1.0 / 16);
  EXPECT_DOUBLE_EQ(metadata_fraction({4, 8}, 16), 12.0 / 128);
  EXPECT_DOUBLE_EQ(metadata_fraction(Pattern::dense()), 0.0);
  EXPECT_DOUBLE_EQ(weight_memory_ratio({2, 4}, 16), 9.0 / 16);
}

}  // namespace
}  // namespace dspattn::theory
