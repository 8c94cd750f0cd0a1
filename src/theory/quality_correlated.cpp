// Q^p when the scores of a group are correlated Gaussians: why interleaved groups keep more than consecutive ones.
#include <cmath>

#include "dspattn/theory.h"
#include "theory/check.h"
#include "theory/gaussian.h"

namespace dspattn::theory {

double one_of_two_quality_correlated(double p, double sigma, double rho) {
  Check check("one_of_two_quality_correlated");
  check.positive("p", p).positive("sigma", sigma).in_closed_range("rho", rho, -1.0, 1.0).raise();
  // Weighting by exp(p X) shifts X - Y ~ N(0, 2 sigma^2 (1 - rho)) by p sigma^2 (1 - rho); it survives when positive.
  return normal_cdf(p * sigma * std::sqrt(0.5 * (1.0 - rho)));
}

double nm_quality_equicorrelated(Pattern pattern, double p, double sigma, double rho) {
  Check check("nm_quality_equicorrelated");
  check.pattern(pattern).positive("p", p).positive("sigma", sigma);
  // g equicorrelated scores exist for rho >= -1/(g - 1); the correlation matrix is not positive below.
  const double least = pattern.group > 1 ? -1.0 / (pattern.group - 1) : -1.0;
  check.in_closed_range("rho", rho, least, 1.0).raise();
  if (rho == 1.0) return static_cast<double>(pattern.keep) / pattern.group;  // all alike: the share that is kept
  return nm_quality(pattern, p, sigma * std::sqrt(1.0 - rho));
}

double mean_group_correlation(Pattern pattern, Grouping grouping, std::span<const double> autocorrelation) {
  Check check("mean_group_correlation");
  check.pattern(pattern).raise();
  if (grouping == Grouping::interleaved) {
    check.require(kInterleaveBlock % pattern.group == 0, "pattern.group",
                  "a divisor of " + show(kInterleaveBlock) + " for interleaved groups", show(pattern.group));
    check.raise();
  }
  const std::int64_t first = key_at_place(0, 0, pattern.group, grouping);
  const std::int64_t span = key_at_place(0, pattern.group - 1, pattern.group, grouping) - first;
  check.require(static_cast<std::int64_t>(autocorrelation.size()) > span, "autocorrelation",
                "given for lags 0 to " + show(span), show(autocorrelation.size()) + " values");
  check.raise();
  for (std::size_t lag = 0; lag < autocorrelation.size(); ++lag) {
    check.in_closed_range("autocorrelation[" + show(lag) + "]", autocorrelation[lag], -1.0, 1.0);
  }
  check.raise();
  if (pattern.group == 1) return 0.0;
  double sum = 0.0;
  int pairs = 0;
  for (int i = 0; i < pattern.group; ++i) {
    for (int j = i + 1; j < pattern.group; ++j) {
      const std::int64_t lag =
          key_at_place(0, j, pattern.group, grouping) - key_at_place(0, i, pattern.group, grouping);
      sum += autocorrelation[static_cast<std::size_t>(lag)];
      ++pairs;
    }
  }
  return sum / pairs;
}

double nm_quality_grouped(Pattern pattern, Grouping grouping, double p, double sigma,
                          std::span<const double> autocorrelation) {
  Check check("nm_quality_grouped");
  check.pattern(pattern).positive("p", p).positive("sigma", sigma).raise();
  return nm_quality_equicorrelated(pattern, p, sigma, mean_group_correlation(pattern, grouping, autocorrelation));
}

}  // namespace dspattn::theory
