#include "theory/check.h"

#include <cmath>
#include <cstdio>

#include "dspattn/error.h"

namespace dspattn::theory {

std::string show(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

Check& Check::require(bool holds, std::string_view name, std::string_view expected, std::string_view given) {
  if (!holds) {
    std::string reason = function_;
    reason.append(": ").append(name).append(" must be ").append(expected).append(", got ").append(given);
    reasons_.push_back(std::move(reason));
  }
  return *this;
}

Check& Check::positive(std::string_view name, double value) {
  return require(std::isfinite(value) && value > 0, name, "finite and > 0", show(value));
}

Check& Check::finite(std::string_view name, double value) {
  return require(std::isfinite(value), name, "finite", show(value));
}

Check& Check::density(double value, std::string_view name) {
  return require(value > 0 && value <= 1, name, "in (0, 1]", show(value));
}

Check& Check::in_closed_range(std::string_view name, double value, double low, double high) {
  return require(value >= low && value <= high, name, "in [" + show(low) + ", " + show(high) + "]", show(value));
}

Check& Check::at_least(std::string_view name, std::int64_t value, std::int64_t least) {
  return require(value >= least, name, ">= " + show(least), show(value));
}

Check& Check::pattern(Pattern pattern) {
  require(pattern.keep >= 1 && pattern.keep <= pattern.group, "pattern.keep", "in [1, pattern.group]",
          show(pattern.keep) + " of " + show(pattern.group));
  return require(pattern.group >= 1 && pattern.group <= kMaxGroup, "pattern.group", "in [1, " + show(kMaxGroup) + "]",
                 show(pattern.group));
}

Check& Check::multiple_of(std::string_view name, std::int64_t value, std::string_view divisor_name,
                          std::int64_t divisor) {
  return require(divisor > 0 && value > 0 && value % divisor == 0, name,
                 "a positive multiple of " + std::string(divisor_name) + " = " + show(divisor), show(value));
}

void Check::raise() const {
  if (!reasons_.empty()) throw Error(reasons_);
}

}  // namespace dspattn::theory
