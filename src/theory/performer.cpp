// Performer's positive random features against N:M pruning: error of one softmax kernel value, and memory traffic.
//
// A feature is exp(w.x - |x|^2/2) with x = q/d^(1/4), y = k/d^(1/4), w ~ N(0, I). With v = |x + y|^2 one feature's
// product has variance SM^2 (exp(v) - 1). Two orthogonal features w1, w2 are not independent: expanding both
// exponentials, the (k, l) term of E[exp(w1.z) exp(w2.z)] is (v/2)^(k+l)/(k! l!) times
//   r(k, l) = G(d/2+k) G(d/2+l) / (G(d/2) G(d/2+k+l)),   G the Gamma function,
// which is 1 when k or l is 0 and at most r(1, 1) = d/(d+2) otherwise: so the covariance is
//   exp(-|x|^2-|y|^2) sum_{k,l>=1} (v/2)^(k+l)/(k! l!) (r(k, l) - 1)  <=  -2/(d+2) (SM - exp(-(|x|^2+|y|^2)/2))^2.
#include <cmath>

#include "dspattn/theory.h"
#include "theory/check.h"
#include "theory/gaussian.h"
#include "theory/order_statistics.h"

namespace dspattn::theory {
namespace {

void add_point(Check& check, const KernelPoint& point) {
  check.at_least("head_dim", point.head_dim, 1).positive("query_norm2", point.query_norm2);
  check.require(std::isfinite(point.key_norm2) && point.key_norm2 >= 0.0, "key_norm2", "finite and >= 0",
                show(point.key_norm2));
  const double limit = std::sqrt(point.query_norm2 * point.key_norm2);
  check.require(std::abs(point.dot) <= limit * (1.0 + 1e-12), "dot", "at most |q||k| = " + show(limit) + " in size",
                show(point.dot));
}

double root_dim(const KernelPoint& point) { return std::sqrt(static_cast<double>(point.head_dim)); }

// v = |q + k|^2 / sqrt d.
double sum_norm2(const KernelPoint& point) {
  return (point.query_norm2 + point.key_norm2 + 2.0 * point.dot) / root_dim(point);
}

double kernel_squared(const KernelPoint& point) { return std::exp(2.0 * point.dot / root_dim(point)); }

// exp(-(|x|^2+|y|^2)/2): what the kernel SM = exp(x.y) is times exp(-|x+y|^2/2).
double norm_factor(const KernelPoint& point) {
  return std::exp(-0.5 * (point.query_norm2 + point.key_norm2) / root_dim(point));
}

// Ordered pairs of distinct features that share an orthogonal block; features come in blocks of d.
double orthogonal_pairs(std::int64_t features, std::int64_t head_dim) {
  const std::int64_t rest = features % head_dim;
  const std::int64_t in_whole_blocks = features - rest;
  return static_cast<double>(in_whole_blocks * (head_dim - 1) + rest * (rest - 1));
}

// The covariance of two orthogonal features' products, by the series above.
double orthogonal_covariance(const KernelPoint& point) {
  const double half_dim = 0.5 * static_cast<double>(point.head_dim);
  const double half_v = 0.5 * sum_norm2(point);
  if (half_v <= 0.0) return 0.0;
  // Poisson(half_v) weights: beyond mean + 12 deviations + 40 nothing is left in double precision.
  const int terms = static_cast<int>(half_v + 12.0 * std::sqrt(half_v) + 40.0);
  const double log_half_v = std::log(half_v);
  const double log_scale = -(point.query_norm2 + point.key_norm2) / root_dim(point);
  double sum = 0.0;
  for (int k = 1; k < terms; ++k) {
    for (int l = 1; l < terms; ++l) {
      const double log_ratio =
          std::lgamma(half_dim + k) + std::lgamma(half_dim + l) - std::lgamma(half_dim) - std::lgamma(half_dim + k + l);
      const double log_weight = (k + l) * log_half_v - std::lgamma(k + 1.0) - std::lgamma(l + 1.0) + log_scale;
      sum += std::exp(log_weight) * std::expm1(log_ratio);
    }
  }
  return sum;
}

void check_features(const char* function, const KernelPoint& point, std::int64_t features) {
  Check check(function);
  add_point(check, point);
  check.at_least("features", features, 1).raise();
}

}  // namespace

double softmax_kernel(const KernelPoint& point) {
  Check check("softmax_kernel");
  add_point(check, point);
  check.raise();
  return std::exp(point.dot / root_dim(point));
}

double nm_kernel_estimate(Pattern pattern, std::span<const double> group_dots, int element, std::int64_t head_dim) {
  Check check("nm_kernel_estimate");
  check.pattern(pattern).at_least("head_dim", head_dim, 1);
  check.require(group_dots.size() == static_cast<std::size_t>(pattern.group), "group_dots",
                "one value per key of the group (" + show(pattern.group) + ")", show(group_dots.size()) + " values");
  check.require(element >= 0 && element < pattern.group, "element", "in [0, " + show(pattern.group) + ")",
                show(element));
  check.raise();
  const auto self = static_cast<std::size_t>(element);
  int ahead = 0;  // larger ones, and equal ones of lower index: ties keep the lower key
  for (std::size_t i = 0; i < group_dots.size(); ++i) {
    if (group_dots[i] > group_dots[self] || (group_dots[i] == group_dots[self] && i < self)) ++ahead;
  }
  return ahead < pattern.keep ? std::exp(group_dots[self] / std::sqrt(static_cast<double>(head_dim))) : 0.0;
}

double nm_kernel_mse(Pattern pattern, const KernelPoint& point) {
  Check check("nm_kernel_mse");
  check.pattern(pattern);
  add_point(check, point);
  check.raise();
  const double place = point.dot / std::sqrt(point.query_norm2);  // q . k' ~ N(0, |q|^2)
  return kernel_squared(point) *
         binomial_above(pattern.keep - 1, pattern.group - 1, normal_cdf(-place), normal_cdf(place));
}

double performer_mse_independent(const KernelPoint& point, std::int64_t features) {
  check_features("performer_mse_independent", point, features);
  return kernel_squared(point) * std::expm1(sum_norm2(point)) / static_cast<double>(features);
}

double performer_mse_orthogonal(const KernelPoint& point, std::int64_t features) {
  check_features("performer_mse_orthogonal", point, features);
  const auto m = static_cast<double>(features);
  return performer_mse_independent(point, features) +
         orthogonal_pairs(features, point.head_dim) / (m * m) * orthogonal_covariance(point);
}

double performer_mse_orthogonal_bound(const KernelPoint& point, std::int64_t features) {
  check_features("performer_mse_orthogonal_bound", point, features);
  const auto m = static_cast<double>(features);
  const double gap = softmax_kernel(point) - norm_factor(point);
  return performer_mse_independent(point, features) - orthogonal_pairs(features, point.head_dim) / (m * m) * 2.0 /
                                                          (static_cast<double>(point.head_dim) + 2.0) * gap * gap;
}

double performer_mse_bound_as_printed(const KernelPoint& point, std::int64_t features) {
  check_features("performer_mse_bound_as_printed", point, features);
  const auto m = static_cast<double>(features);
  return kernel_squared(point) / m *
         (std::expm1(sum_norm2(point)) - (1.0 - 1.0 / m) * 2.0 / (static_cast<double>(point.head_dim) + 2.0));
}

double nm_relative_mse(Pattern pattern, double sigma) {
  Check("nm_relative_mse").pattern(pattern).positive("sigma", sigma).raise();
  return 1.0 - nm_quality(pattern, 2.0, sigma);
}

double performer_relative_mse(std::int64_t head_dim, std::int64_t features) {
  Check check("performer_relative_mse");
  check.at_least("features", features, 1);
  check.require(head_dim > 36, "head_dim", "> 36 (the mean square diverges for q, k ~ N(0, I) otherwise)",
                show(head_dim));
  check.raise();
  // E exp(c(|q|^2+|k|^2) + 2 b q.k) = ((1-2(c+b))(1-2(c-b)))^(-d/2): c = 1/sqrt d, b = 2/sqrt d for SM^2 exp(v), since
  // v = (|q|^2+|k|^2+2 q.k)/sqrt d, and c = 0, b = 1/sqrt d for SM^2.
  const auto d = static_cast<double>(head_dim);
  const double root = std::sqrt(d);
  const double log_square = -0.5 * d * (std::log1p(-6.0 / root) + std::log1p(2.0 / root));
  const double log_kernel = -0.5 * d * std::log1p(-4.0 / d);
  return std::expm1(log_square - log_kernel) / static_cast<double>(features);
}

std::int64_t performer_features(std::int64_t head_dim) {
  Check("performer_features").at_least("head_dim", head_dim, 2).raise();
  const auto d = static_cast<double>(head_dim);
  return std::llround(d * std::log(d));
}

Traffic performer_traffic(const Shape& shape, std::int64_t features, FeatureMapCount count) {
  Check check("performer_traffic");
  check.at_least("keys", shape.keys, 1).at_least("head_dim", shape.head_dim, 1).at_least("tile", shape.tile, 1);
  check.at_least("features", features, 1).raise();
  const auto n = static_cast<double>(shape.keys);
  const auto d = static_cast<double>(shape.head_dim);
  const auto t = static_cast<double>(shape.tile);
  const auto m = static_cast<double>(features);
  const double map = count == FeatureMapCount::as_printed ? m + 3.0 : 2.0 * m + 2.0;
  // Per side: T1 = X P; T2 = row norms; T3 = row maxima; phi = exp(T1 - T2 - T3).
  const double one_side = n * m * (2.0 * d / t + 1.0) + n * (d + 1.0) + n * (m + 1.0) + n * map;
  const double normaliser = m * (n + 1.0) + n * (m / t + m + 1.0);                        // T7, T8
  const double products = m * d * (2.0 * n / t + 1.0) + n * d * (2.0 * m / t + 1.0) + n;  // T9, T10
  return {.scores = 0, .softmax = 0, .values = products, .other = 2.0 * one_side + normaliser};
}

double performer_break_even_keys(Pattern pattern, std::int64_t head_dim, std::int64_t tile, std::int64_t features,
                                 FeatureMapCount count, int element_bits) {
  // Attention moves A n^2 + d n, Performer B n + C: read the coefficients off the models at two lengths.
  const double attention_1 = nm_traffic({1, head_dim, tile}, pattern, element_bits).total();
  const double performer_1 = performer_traffic({1, head_dim, tile}, features, count).total();
  const double performer_2 = performer_traffic({2, head_dim, tile}, features, count).total();
  const auto d = static_cast<double>(head_dim);
  const double quadratic = attention_1 - d;
  const double slope = performer_2 - performer_1;
  const double constant = performer_1 - slope;
  const double linear = slope - d;
  return (linear + std::sqrt(linear * linear + 4.0 * quadratic * constant)) / (2.0 * quadratic);
}

}  // namespace dspattn::theory
