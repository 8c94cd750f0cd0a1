// Checks of a call that brings sums of V up to date. Returns all reasons; none reads device memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dspattn/value_sums.h"

namespace dspattn::core {

inline constexpr std::int64_t kMostSummedKeys = std::int64_t{1} << 29;  // of a sequence

std::vector<std::string> value_sums_reasons(const ValueSumsArgs& args);

// Sequences, and keys of each at most.
struct SumsExtents {
  std::int64_t batch = 0;
  std::int64_t n_k = 0;
};
SumsExtents extents_of(const ValueSumsArgs& args);

}  // namespace dspattn::core
