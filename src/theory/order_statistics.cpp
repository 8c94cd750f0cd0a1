#include "theory/order_statistics.h"

#include <algorithm>
#include <cmath>
#include <concepts>

namespace dspattn::theory {
namespace {

// The logarithm of a binomial coefficient.
double log_choose(std::int64_t trials, std::int64_t chosen) {
  const auto count = static_cast<double>(trials);
  const auto at = static_cast<double>(chosen);
  return std::lgamma(count + 1.0) - std::lgamma(at + 1.0) - std::lgamma(count - at + 1.0);
}

// Sum of the binomial terms first..last. It starts at the term nearest the mode, whose logarithm is exact to rounding,
// and walks outwards by the ratio of neighbouring terms until they no longer matter. log_choose_of(i): of trials and i.
template <std::invocable<std::int64_t> LogChoose>
double sum_terms(std::int64_t first, std::int64_t last, std::int64_t trials, double probability, double complement,
                 LogChoose&& log_choose_of) {
  if (first > last) return 0.0;
  if (probability <= 0.0) return first == 0 ? 1.0 : 0.0;
  if (complement <= 0.0) return last == trials ? 1.0 : 0.0;
  const auto count = static_cast<double>(trials);
  const auto mode = static_cast<std::int64_t>((count + 1.0) * probability);
  const std::int64_t start = std::clamp(mode, first, last);
  const auto at = static_cast<double>(start);
  const double log_term = log_choose_of(start) + at * std::log(probability) + (count - at) * std::log(complement);
  const double peak = std::exp(log_term);
  constexpr double kNegligible = 1e-18;  // below half a rounding of the sum
  double sum = peak;
  double term = peak;
  for (std::int64_t i = start; i < last && term > kNegligible * sum; ++i) {
    term *= static_cast<double>(trials - i) / static_cast<double>(i + 1) * (probability / complement);
    sum += term;
  }
  term = peak;
  for (std::int64_t i = start; i > first && term > kNegligible * sum; --i) {
    term *= static_cast<double>(i) / static_cast<double>(trials - i + 1) * (complement / probability);
    sum += term;
  }
  return std::min(sum, 1.0);
}

}  // namespace

BinomialAtMost::BinomialAtMost(std::int64_t most, std::int64_t trials)
    : last_(std::min(most, trials)), trials_(trials) {
  for (std::int64_t i = 0; i <= last_; ++i) log_choose_.push_back(log_choose(trials, i));
}

double BinomialAtMost::operator()(double probability, double complement) const {
  return sum_terms(0, last_, trials_, probability, complement,
                   [&](std::int64_t i) { return log_choose_[static_cast<std::size_t>(i)]; });
}

double binomial_above(std::int64_t most, std::int64_t trials, double probability, double complement) {
  return sum_terms(most + 1, trials, trials, probability, complement,
                   [&](std::int64_t i) { return log_choose(trials, i); });
}

}  // namespace dspattn::theory
