// Pattern and grouping of an operator's integer and boolean arguments.
#pragma once

#include <cstdint>
#include <string>

#include "dspattn/error.h"
#include "dspattn/pattern.h"

namespace dspattn::torch_binding {

// Checked before anything is narrowed or divided: the operators can be called with any 64-bit integers.
inline Pattern pattern_of(std::int64_t keep, std::int64_t group) {
  if (keep < 1 || keep > group || group > kMaxGroup) {
    throw Error("pattern: expected N:M with 1 <= N <= M <= " + std::to_string(kMaxGroup) + ", got " +
                std::to_string(keep) + ":" + std::to_string(group));
  }
  return {static_cast<int>(keep), static_cast<int>(group)};
}

inline Grouping grouping_of(bool interleaved) { return interleaved ? Grouping::interleaved : Grouping::consecutive; }

}  // namespace dspattn::torch_binding
