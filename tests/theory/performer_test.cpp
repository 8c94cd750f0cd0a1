// Errors of single kernel values against experiments with real vectors and features; Performer's traffic.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "dspattn/theory.h"
#include "theory/interval.h"

namespace dspattn::theory {
namespace {

// Small norms and few dimensions: the squared error of exp features has no usable fourth moment at |q|^2 = d.
constexpr std::array<KernelPoint, 3> kPoints = {KernelPoint{0.6, 1.5, 1.0, 8}, KernelPoint{-0.3, 1.0, 1.5, 8},
                                                KernelPoint{0.5, 0.8, 0.8, 8}};

TEST(NmKernel, MseMatchesTheExperiment) {
  for (const KernelPoint& point : kPoints) {
    for (const Pattern pattern : {Pattern{1, 2}, Pattern{2, 4}, Pattern{4, 8}}) {
      const Estimate estimate = simulate_nm_kernel_mse(pattern, point, 20000, 7);
      EXPECT_TRUE(inside(nm_kernel_mse(pattern, point), estimate)) << to_string(pattern);
      EXPECT_TRUE(narrower_than(0.06, estimate));
    }
  }
}

TEST(NmKernel, OneOfTwoIsThePapersFormula) {
  for (const KernelPoint& point : kPoints) {
    const double kernel = softmax_kernel(point);
    const double inner = std::sqrt(8.0) / std::sqrt(2 * point.query_norm2) * std::log(kernel);
    EXPECT_NEAR(nm_kernel_mse({1, 2}, point), kernel * kernel * (1 - std::erf(inner)) / 2, 1e-14);
  }
}

TEST(NmKernel, EstimateKeepsTheLargestAndBreaksTiesLow) {
  const std::array<double, 4> dots = {1.0, 3.0, 3.0, -2.0};
  EXPECT_DOUBLE_EQ(nm_kernel_estimate({2, 4}, dots, 1, 64), std::exp(3.0 / 8));
  EXPECT_DOUBLE_EQ(nm_kernel_estimate({2, 4}, dots, 2, 64), std::exp(3.0 / 8));
  EXPECT_DOUBLE_EQ(nm_kernel_estimate({2, 4}, dots, 0, 64), 0.0);
  EXPECT_DOUBLE_EQ(nm_kernel_estimate({1, 4}, dots, 1, 64), std::exp(3.0 / 8));
  EXPECT_DOUBLE_EQ(nm_kernel_estimate({1, 4}, dots, 2, 64), 0.0);
}

TEST(Performer, MseMatchesTheExperiment) {
  for (const KernelPoint& point : kPoints) {
    for (const std::int64_t features : {8, 12}) {  // one orthogonal block, and one and a half
      const Estimate plain = simulate_performer_mse(point, features, Features::independent, 20000, 13);
      EXPECT_TRUE(inside(performer_mse_independent(point, features), plain)) << features;
      const Estimate orthogonal = simulate_performer_mse(point, features, Features::orthogonal, 20000, 19);
      EXPECT_TRUE(inside(performer_mse_orthogonal(point, features), orthogonal)) << features;
      EXPECT_TRUE(narrower_than(0.25 * orthogonal.mean, orthogonal));
    }
  }
  // The experiment can tell orthogonal from independent features.
  const Estimate orthogonal = simulate_performer_mse(kPoints[0], 8, Features::orthogonal, 20000, 31);
  EXPECT_FALSE(inside(performer_mse_independent(kPoints[0], 8), orthogonal));
}

TEST(Performer, OrthogonalIsBelowItsBoundAndTheBoundBelowIndependent) {
  for (const KernelPoint& point : kPoints) {
    for (const std::int64_t features : {2, 16, 100}) {
      EXPECT_LE(performer_mse_orthogonal(point, features), performer_mse_orthogonal_bound(point, features));
      EXPECT_LT(performer_mse_orthogonal_bound(point, features), performer_mse_independent(point, features));
    }
    EXPECT_DOUBLE_EQ(performer_mse_orthogonal(point, 1), performer_mse_independent(point, 1));
  }
}

TEST(Performer, PrintedBoundIsNone) {
  // k = -q: every feature's product is the constant exp(-|x|^2): no error at all, yet the printed bound is negative.
  const KernelPoint opposite{-4.0, 4.0, 4.0, 16};
  EXPECT_NEAR(performer_mse_orthogonal(opposite, 16), 0.0, 1e-15);
  EXPECT_NEAR(performer_mse_orthogonal_bound(opposite, 16), 0.0, 1e-15);
  EXPECT_LT(performer_mse_bound_as_printed(opposite, 16), -1e-6);
}

// E over one coordinate of q and of k by a plain sum; the d coordinates multiply.
TEST(Performer, RelativeMseMatchesCoordinatewiseIntegration) {
  const double root = 8.0;
  double kernel = 0.0;
  double square = 0.0;
  double mass = 0.0;
  for (double q = -16; q <= 16; q += 0.05) {
    for (double k = -16; k <= 16; k += 0.05) {
      const double density = std::exp(-0.5 * (q * q + k * k));
      mass += density;
      kernel += density * std::exp(2 * q * k / root);
      square += density * std::exp((2 * q * k + (q + k) * (q + k)) / root);
    }
  }
  const double expected = (std::pow(square / kernel, 64) - 1) / 266;
  EXPECT_NEAR(performer_relative_mse(64, 266) / expected, 1.0, 1e-6);
}

TEST(Performer, NmRelativeMseIsTheLossOfSquaredWeight) {
  // Mean of SM^2 1[dropped] over the score, by a plain sum over the pair.
  double lost = 0.0;
  double all = 0.0;
  for (double x = -9; x <= 9; x += 0.02) {
    for (double y = -9; y <= 9; y += 0.02) {
      const double mass = std::exp(2 * x - 0.5 * (x * x + y * y));
      all += mass;
      if (x < y) lost += mass;
      if (x == y) lost += 0.5 * mass;
    }
  }
  EXPECT_NEAR(nm_relative_mse({1, 2}, 1.0), lost / all, 5e-3);
}

TEST(Performer, CompleteTrafficEqualsTheCountOnWholeTiles) {
  const Shape shape{.keys = 512, .head_dim = 128, .tile = 64};
  const Traffic formula = performer_traffic(shape, 256, FeatureMapCount::complete);
  const Traffic counted = count_performer_traffic(shape, 256);
  EXPECT_DOUBLE_EQ(formula.values, counted.values);
  EXPECT_DOUBLE_EQ(formula.other, counted.other);
  // The printed count leaves out the n m feature values written per side, and counts one element per row too many.
  const Traffic printed = performer_traffic(shape, 256, FeatureMapCount::as_printed);
  EXPECT_DOUBLE_EQ(counted.other - printed.other, 2 * 512.0 * (256 - 1));
}

// The same by counting: where every extent is whole tiles, the walks cross between the two lengths around it.
TEST(Performer, BreakEvenIsWhereTheWalksCross) {
  constexpr std::int64_t tile = 32, dim = 64, features = 256;
  for (const Pattern pattern : {Pattern::dense(), Pattern{2, 4}}) {
    const double keys = performer_break_even_keys(pattern, dim, tile, features, FeatureMapCount::complete);
    const auto below = static_cast<std::int64_t>(keys / tile) * tile;
    for (const std::int64_t n : {below, below + tile}) {
      const Shape shape{.keys = n, .head_dim = dim, .tile = tile};
      const bool performer_wins =
          count_performer_traffic(shape, features).total() < count_nm_traffic(shape, pattern).total();
      EXPECT_EQ(performer_wins, static_cast<double>(n) > keys) << n;
    }
  }
}

TEST(Performer, BreakEvenIsWhereTheTrafficsCross) {
  for (const FeatureMapCount count : {FeatureMapCount::as_printed, FeatureMapCount::complete}) {
    for (const Pattern pattern : {Pattern::dense(), Pattern{2, 4}}) {
      const double keys = performer_break_even_keys(pattern, 64, 128, 266, count);
      const auto below = static_cast<std::int64_t>(keys);
      for (const std::int64_t n : {below, below + 1}) {
        const Shape shape{.keys = n, .head_dim = 64, .tile = 128};
        const bool performer_wins = performer_traffic(shape, 266, count).total() < nm_traffic(shape, pattern).total();
        EXPECT_EQ(performer_wins, static_cast<double>(n) > keys) << n;
      }
    }
  }
}

}  // namespace
}  // namespace dspattn::theory
