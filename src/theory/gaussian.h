// The standard normal distribution and one quadrature rule: what the closed forms are written in.
#pragma once

#include <cmath>
#include <concepts>
#include <numbers>

namespace dspattn::theory {

inline double normal_pdf(double z) { return std::exp(-0.5 * z * z) / std::sqrt(2.0 * std::numbers::pi); }

// P(Z <= z); erfc keeps full relative precision in the lower tail.
inline double normal_cdf(double z) { return 0.5 * std::erfc(-z / std::numbers::sqrt2); }

// The inverse of normal_cdf, by bisection on the lower tail; probability in (0, 1).
double normal_quantile(double probability);

// Trapezoidal rule on [low, high]. For a smooth integrand that has decayed to nothing at both ends it converges faster
// than any power of the step (Euler-Maclaurin: all end corrections vanish), and that is how it is used here.
template <std::invocable<double> Function>
double integrate_decaying(Function&& function, double low, double high, int steps) {
  const double width = (high - low) / steps;
  double sum = 0.5 * (function(low) + function(high));
  for (int i = 1; i < steps; ++i) sum += function(low + width * i);
  return sum * width;
}

}  // namespace dspattn::theory
