// Parameter checks of the theory functions: collect every reason, then raise once.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dspattn/pattern.h"

namespace dspattn::theory {

class Check {
 public:
  explicit Check(std::string_view function) : function_(function) {}

  Check& positive(std::string_view name, double value);
  Check& finite(std::string_view name, double value);
  Check& density(double value, std::string_view name = "density");
  Check& in_closed_range(std::string_view name, double value, double low, double high);
  Check& at_least(std::string_view name, std::int64_t value, std::int64_t least);
  Check& pattern(Pattern pattern);
  Check& multiple_of(std::string_view name, std::int64_t value, std::string_view divisor_name, std::int64_t divisor);
  Check& require(bool holds, std::string_view name, std::string_view expected, std::string_view given);
  // Throws dspattn::Error with all reasons collected; returns quietly when there are none.
  void raise() const;

 private:
  std::string function_;
  std::vector<std::string> reasons_;
};

std::string show(double value);
std::string show(std::integral auto value) { return std::to_string(value); }

}  // namespace dspattn::theory
