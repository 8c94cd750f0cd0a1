#include "theory/gaussian.h"

namespace dspattn::theory {

double normal_quantile(double probability) {
  if (probability > 0.5) return -normal_quantile(1.0 - probability);
  double low = -40.0;  // normal_cdf(-40) is below the smallest double
  double high = 0.0;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (normal_cdf(middle) < probability ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

}  // namespace dspattn::theory
