// Q^p: the definition, and its value for long rows of independent Gaussian scores.
//
// With x = exp(mu + sigma z), weighting z's density by x^p shifts its mean by a = p sigma. So the kept share of the
// p-th power mass is the probability that a score drawn from the shifted density survives among unshifted ones.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "dspattn/theory.h"
#include "theory/check.h"
#include "theory/gaussian.h"
#include "theory/order_statistics.h"

namespace dspattn::theory {
namespace {

// Nine deviations leave 1e-19 outside; 0.02 resolves the integrands below to rounding (halving it changes nothing).
constexpr double kTail = 9.0;
constexpr double kStep = 0.02;

// P(a score of mean `shift` is not among the `keep` largest of `group`, the others having mean 0). Every term is
// positive, so the result is precise even where the quality rounds to 1.
double nm_miss(Pattern pattern, double given_shift) {
  // Beyond this the chance is below the smallest double, and stays there.
  constexpr double kFarAhead = 60.0;
  const double shift = std::min(given_shift, kFarAhead);
  const auto integrand = [&](double z) {
    return normal_pdf(z - shift) * binomial_above(pattern.keep - 1, pattern.group - 1, normal_cdf(-z), normal_cdf(z));
  };
  const double low = -kTail;
  const double high = shift + kTail;
  return integrate_decaying(integrand, low, high, static_cast<int>((high - low) / kStep) + 1);
}

double topk_miss(double density, double shift) { return normal_cdf(-normal_quantile(density) - shift); }

}  // namespace

double quality(std::span<const double> weights, std::span<const std::uint8_t> kept, std::int64_t keys, double p) {
  Check check("quality");
  check.positive("p", p).at_least("keys", keys, 1);
  check.require(weights.size() == kept.size(), "kept", "as long as weights (" + show(weights.size()) + ")",
                show(kept.size()));
  check.require(keys >= 1 && !weights.empty() && weights.size() % static_cast<std::size_t>(keys) == 0, "weights",
                "a positive multiple of keys = " + show(keys) + " long", show(weights.size()));
  check.raise();
  double sum = 0.0;
  std::int64_t rows = 0;
  const auto width = static_cast<std::size_t>(keys);
  for (std::size_t row = 0; row < weights.size(); row += width) {
    double all = 0.0;
    double held = 0.0;
    for (std::size_t i = row; i < row + width; ++i) {
      check.require(weights[i] >= 0.0 && std::isfinite(weights[i]), "weights[" + show(i) + "]", "finite and >= 0",
                    show(weights[i]));
      check.raise();
      const double power = std::pow(weights[i], p);
      all += power;
      if (kept[i] != 0) held += power;
    }
    if (all > 0.0) {
      sum += held / all;
      ++rows;
    }
  }
  check.require(rows > 0, "weights", "positive somewhere", "zeros only").raise();
  return sum / static_cast<double>(rows);
}

double density(std::span<const std::uint8_t> kept) {
  Check("density").require(!kept.empty(), "kept", "not empty", "0 entries").raise();
  std::size_t count = 0;
  for (const std::uint8_t flag : kept) count += flag != 0 ? 1 : 0;
  return static_cast<double>(count) / static_cast<double>(kept.size());
}

double mean_power(double p, double mu, double sigma) {
  Check("mean_power").positive("p", p).finite("mu", mu).positive("sigma", sigma).raise();
  return std::exp(p * mu + 0.5 * p * p * sigma * sigma);
}

double topk_quality(double density, double p, double sigma) {
  Check("topk_quality").density(density).positive("p", p).positive("sigma", sigma).raise();
  if (density == 1.0) return 1.0;
  return normal_cdf(p * sigma + normal_quantile(density));
}

double fixed_quality(double density) {
  Check("fixed_quality").density(density).raise();
  return density;
}

double one_of_two_quality(double p, double sigma) {
  Check("one_of_two_quality").positive("p", p).positive("sigma", sigma).raise();
  return normal_cdf(p * sigma / std::numbers::sqrt2);
}

double two_of_four_quality_lower_bound(double p, double sigma) {
  Check("two_of_four_quality_lower_bound").positive("p", p).positive("sigma", sigma).raise();
  return one_of_two_quality(p, sigma);
}

double nm_quality(Pattern pattern, double p, double sigma) {
  Check("nm_quality").pattern(pattern).positive("p", p).positive("sigma", sigma).raise();
  return 1.0 - nm_miss(pattern, p * sigma);
}

double spread_where_topk_overtakes(Pattern pattern, double density) {
  Check check("spread_where_topk_overtakes");
  check.pattern(pattern).density(density).raise();
  const double share = static_cast<double>(pattern.keep) / pattern.group;
  check.require(density < share, "density", "below keep/group = " + show(share) + " (top-k of more never keeps less)",
                show(density));
  check.raise();
  // Both miss rates fall with the spread; top-k's is larger at 0 and in the end falls as exp(-a^2/2), faster than any
  // N:M's. Compare logarithms, which stay finite up to a spread of about 30.
  const auto topk_behind = [&](double spread) {
    return std::log(topk_miss(density, spread)) > std::log(nm_miss(pattern, spread));
  };
  double low = 0.0;
  double high = 1.0;
  while (topk_behind(high)) {
    low = high;
    high *= 1.5;
    if (high > 30.0) return std::numeric_limits<double>::infinity();
  }
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (topk_behind(middle) ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

}  // namespace dspattn::theory
