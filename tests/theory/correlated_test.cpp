// Correlated scores: closed forms where they exist, the mean-correlation approximation, both against experiments.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "dspattn/theory.h"
#include "theory/interval.h"

namespace dspattn::theory {
namespace {

std::vector<double> exponential_correlation(double first, std::size_t lags) {
  std::vector<double> correlation(lags);
  for (std::size_t lag = 0; lag < lags; ++lag) correlation[lag] = std::pow(first, static_cast<double>(lag));
  return correlation;
}

TEST(Correlated, PairsMatchTheExperiment) {
  std::uint64_t seed = 3;
  for (const double rho : {-0.5, 0.3, 0.8}) {
    const std::vector<double> correlation = {1.0, rho};
    const RowModel model{.p = 1.2, .sigma = 1.0, .keys = 2, .autocorrelation = correlation};
    const Estimate estimate = simulate_quality(Selection::nm({1, 2}), model, Average::means, 120000, seed++);
    EXPECT_TRUE(inside(one_of_two_quality_correlated(1.2, 1.0, rho), estimate)) << rho;
    EXPECT_TRUE(narrower_than(0.03, estimate));
  }
}

TEST(Correlated, EquicorrelatedGroupsMatchTheExperiment) {
  const double rho = 0.6;
  const std::vector<double> correlation = {1.0, rho, rho, rho};
  const RowModel model{.p = 1.5, .sigma = 0.8, .keys = 4, .autocorrelation = correlation};
  for (const Pattern pattern : {Pattern{1, 4}, Pattern{2, 4}, Pattern{3, 4}}) {
    const Estimate estimate = simulate_quality(Selection::nm(pattern), model, Average::means, 80000, 17);
    EXPECT_TRUE(inside(nm_quality_equicorrelated(pattern, 1.5, 0.8, rho), estimate)) << to_string(pattern);
    EXPECT_TRUE(narrower_than(0.03, estimate));
  }
}

TEST(Correlated, GroupingsMatchTheExperimentOnWholeRows) {
  const std::vector<double> correlation = exponential_correlation(0.7, 128);
  const RowModel model{.p = 1.0, .sigma = 1.0, .keys = 128, .autocorrelation = correlation};
  std::uint64_t seed = 29;
  for (const Grouping grouping : {Grouping::consecutive, Grouping::interleaved}) {
    const Estimate pairs = simulate_quality(Selection::nm({1, 2}, grouping), model, Average::means, 4000, seed++);
    EXPECT_TRUE(inside(nm_quality_grouped({1, 2}, grouping, 1.0, 1.0, correlation), pairs)) << to_string(grouping);
    // 2:4 of consecutive keys: lags 1 to 3 differ, the mean-correlation value is an approximation. 0.01 is its stated
    // accuracy in docs/theory.md.
    const Estimate fours = simulate_quality(Selection::nm({2, 4}, grouping), model, Average::means, 4000, seed++);
    EXPECT_NEAR(nm_quality_grouped({2, 4}, grouping, 1.0, 1.0, correlation), fours.mean,
                0.01 + kSigmas * fours.standard_error);
  }
}

TEST(Correlated, InterleavingKeepsMoreWhenNeighboursAgree) {
  const std::vector<double> correlation = exponential_correlation(0.8, 128);
  for (const Pattern pattern : {Pattern{1, 2}, Pattern{2, 4}, Pattern{1, 4}, Pattern{4, 8}}) {
    EXPECT_GT(nm_quality_grouped(pattern, Grouping::interleaved, 1.0, 1.0, correlation),
              nm_quality_grouped(pattern, Grouping::consecutive, 1.0, 1.0, correlation) + 0.02);
  }
}

TEST(Correlated, NoCorrelationIsTheIndependentCase) {
  EXPECT_DOUBLE_EQ(one_of_two_quality_correlated(1.3, 0.9, 0.0), one_of_two_quality(1.3, 0.9));
  EXPECT_DOUBLE_EQ(nm_quality_equicorrelated({2, 4}, 1.3, 0.9, 0.0), nm_quality({2, 4}, 1.3, 0.9));
  EXPECT_DOUBLE_EQ(nm_quality_equicorrelated({2, 4}, 1.3, 0.9, 1.0), 0.5);
  EXPECT_DOUBLE_EQ(one_of_two_quality_correlated(1.3, 0.9, 1.0), 0.5);
}

TEST(Correlated, MeanGroupCorrelationTakesTheLagsOfTheGrouping) {
  std::vector<double> correlation(128, 0.0);
  correlation[0] = 1.0;
  correlation[1] = 0.6;
  correlation[2] = 0.4;
  correlation[3] = 0.2;
  correlation[32] = 0.06;
  correlation[64] = 0.12;
  EXPECT_DOUBLE_EQ(mean_group_correlation({2, 4}, Grouping::consecutive, correlation), (3 * 0.6 + 2 * 0.4 + 0.2) / 6);
  EXPECT_DOUBLE_EQ(mean_group_correlation({2, 4}, Grouping::interleaved, correlation), (3 * 0.06 + 2 * 0.12) / 6);
  EXPECT_DOUBLE_EQ(mean_group_correlation({1, 2}, Grouping::interleaved, correlation), 0.12);
}

}  // namespace
}  // namespace dspattn::theory
