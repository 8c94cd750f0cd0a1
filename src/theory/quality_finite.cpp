// Q^p of rows with finitely many keys: the mean of a ratio, not the ratio of two means.
//
// With 1/S = integral of exp(-t S) dt the mean splits into one-score integrals:
//   Q = n  int dt L(t)^(n-1)  int x exp(-t x) B(U/L) phi(z) dz,     x = exp(a z),  a = p sigma,
// where L(t) = E exp(-t x), U(z, t) is the part of that mean that lies above z, and B(u) = P(Binomial(M-1, u) < N) is
// the chance that fewer than N of the other M-1 scores of the group are larger. Top-k of n keys is k:n.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "dspattn/theory.h"
#include "theory/check.h"
#include "theory/gaussian.h"
#include "theory/order_statistics.h"

namespace dspattn::theory {
namespace {

constexpr double kFarScore = 9.5;  // 1e-21 of the scores lie outside
constexpr double kStepZ = 0.06;    // divided by a; the corrected running sum below is then right to 2e-8
constexpr double kStepLogT = 0.2;  // the kernel t x exp(-t x) is analytic in log t: error exp(-pi^2/0.2)
constexpr double kLogRounding = 37.0;
constexpr double kNoWeight = 1e-18;   // exp(-1e-18) is 1
constexpr double kUnderflow = 746.0;  // exp(-746) is 0
constexpr double kMaxSpread = 70.0;   // exp(a kFarScore) is within a double's range up to 74

void check_spread(Check& check, double p, double sigma) {
  check.require(p * sigma <= kMaxSpread, "p * sigma", "at most " + show(kMaxSpread), show(p * sigma));
}

double mean_ratio(std::int64_t keep, std::int64_t group, double spread, std::int64_t keys) {
  const double step = kStepZ / std::max(1.0, spread);
  const auto points = static_cast<std::size_t>(2.0 * kFarScore / step) + 1;
  std::vector<double> x(points), density(points), tilted(points), below(points), untilted(points + 1);
  for (std::size_t i = 0; i < points; ++i) {
    const double z = -kFarScore + step * static_cast<double>(i);
    x[i] = std::exp(spread * z);
    density[i] = normal_pdf(z);
    untilted[i + 1] = untilted[i] + (0.5 * step * density[i] + (i > 0 ? 0.5 * step * density[i - 1] : 0.0));
  }
  const BinomialAtMost stays(keep - 1, group - 1);
  const auto count = static_cast<double>(keys);
  const double first = -spread * kFarScore - std::log(count) - kLogRounding;
  const double last = spread * kFarScore + 4.0;
  double sum = 0.0;
  double largest = 0.0;
  for (double log_t = first; log_t <= last; log_t += kStepLogT) {
    const double t = std::exp(log_t);
    // x grows. Below `begin` exp(-t x) is 1 and weighs nothing, from `end` on it is 0: of each step a part remains.
    const auto begin = static_cast<std::size_t>(std::lower_bound(x.begin(), x.end(), kNoWeight / t) - x.begin());
    const auto end = static_cast<std::size_t>(std::upper_bound(x.begin(), x.end(), kUnderflow / t) - x.begin());
    // Running integral of phi(z) exp(-t x): trapezoid with the first Euler-Maclaurin correction, -h^2/12 g'(z).
    double running = untilted[begin];
    double previous = begin > 0 ? density[begin - 1] : 0.0;
    for (std::size_t i = begin; i < end; ++i) {
      const double z = -kFarScore + step * static_cast<double>(i);
      tilted[i] = density[i] * std::exp(-t * x[i]);
      running += 0.5 * step * tilted[i] + 0.5 * step * previous;
      below[i] = running + step * step / 12.0 * tilted[i] * (z + spread * t * x[i]);
      previous = tilted[i];
    }
    const double mass = end < points ? running + 0.5 * step * previous : running;
    if (mass <= 0.0) break;
    const double others = std::exp((count - 1.0) * std::log(mass));
    if (others == 0.0 && sum > 0.0) break;
    double inner = 0.0;
    for (std::size_t i = begin; i < end; ++i) {
      const double weight = t * x[i] * tilted[i];
      if (weight < 1e-18) continue;
      const double lower = std::min(1.0, std::max(0.0, below[i] / mass));
      inner += weight * stays(1.0 - lower, lower);
    }
    const double term = count * others * inner * step;
    sum += term;
    largest = std::max(largest, term);
    if (log_t > 0.0 && term < 1e-16 * largest) break;
  }
  return std::min(1.0, sum * kStepLogT);
}

}  // namespace

double nm_quality_finite(Pattern pattern, double p, double sigma, std::int64_t keys) {
  Check check("nm_quality_finite");
  check.pattern(pattern).positive("p", p).positive("sigma", sigma).at_least("keys", keys, 1);
  check_spread(check, p, sigma);
  check.multiple_of("keys", keys, "pattern.group", pattern.group).raise();
  return mean_ratio(pattern.keep, pattern.group, p * sigma, keys);
}

double topk_quality_finite(std::int64_t kept_keys, double p, double sigma, std::int64_t keys) {
  Check check("topk_quality_finite");
  check.positive("p", p).positive("sigma", sigma).at_least("keys", keys, 1);
  check_spread(check, p, sigma);
  check.require(kept_keys >= 1 && kept_keys <= keys, "kept_keys", "in [1, keys = " + show(keys) + "]", show(kept_keys));
  check.raise();
  return mean_ratio(kept_keys, keys, p * sigma, keys);
}

double spread_where_topk_overtakes_finite(Pattern pattern, std::int64_t kept_keys, std::int64_t keys) {
  Check check("spread_where_topk_overtakes_finite");
  check.pattern(pattern).at_least("keys", keys, 1).at_least("kept_keys", kept_keys, 1).raise();
  const double share = static_cast<double>(pattern.keep) / pattern.group * static_cast<double>(keys);
  check.require(static_cast<double>(kept_keys) < share, "kept_keys",
                "fewer than the pattern's " + show(share) + " (top-k of more never keeps less)",
                std::to_string(kept_keys));
  check.raise();
  const auto topk_behind = [&](double spread) {
    return topk_quality_finite(kept_keys, spread, 1.0, keys) < nm_quality_finite(pattern, spread, 1.0, keys);
  };
  double low = 0.0;
  double high = 1.0;
  while (topk_behind(high)) {
    low = high;
    high *= 1.5;
    if (high > 30.0) return std::numeric_limits<double>::infinity();
  }
  for (int i = 0; i < 16; ++i) {  // to 1e-4: each step costs two double integrals
    const double middle = 0.5 * (low + high);
    (topk_behind(middle) ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

}  // namespace dspattn::theory
