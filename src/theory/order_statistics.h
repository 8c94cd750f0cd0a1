// When does one member of a group stay? When fewer than `keep` of the other group-1 members lie above it.
#pragma once

#include <cstdint>

namespace dspattn::theory {

// P(Binomial(trials, probability) <= most) and its complement, each summed directly so that small values stay precise.
// `probability` and `complement` = 1 - probability are given apart, for the same reason.
double binomial_at_most(std::int64_t most, std::int64_t trials, double probability, double complement);
double binomial_above(std::int64_t most, std::int64_t trials, double probability, double complement);

}  // namespace dspattn::theory
