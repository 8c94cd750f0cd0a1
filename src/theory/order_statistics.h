// When does one member of a group stay? When fewer than `keep` of the other group-1 members lie above it.
#pragma once

#include <cstdint>
#include <vector>

namespace dspattn::theory {

// P(Binomial(trials, probability) <= most), for many probabilities: the logarithms of the coefficients are kept. And
// the complement, for one. Each is summed directly, so that small values stay precise; `probability` and `complement`
// = 1 - probability are given apart for the same reason.
class BinomialAtMost {
 public:
  BinomialAtMost(std::int64_t most, std::int64_t trials);
  double operator()(double probability, double complement) const;

 private:
  std::int64_t last_, trials_;
  std::vector<double> log_choose_;  // of trials and 0..last
};
double binomial_above(std::int64_t most, std::int64_t trials, double probability, double complement);

}  // namespace dspattn::theory
