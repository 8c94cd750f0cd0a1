// The patterns that 16-bit sparse tensor cores multiply.
#pragma once

#include <cstdint>

#include "dspattn/pattern.h"

namespace dspattn::cuda::blocks {

// Both are 2:4 to the tensor core; one_of_two fills a group with two pairs.
enum class Selection : std::uint8_t { two_of_four, one_of_two };

DSPATTN_HOST_DEVICE constexpr Pattern pattern_of(Selection selection) {
  return selection == Selection::two_of_four ? Pattern{2, 4} : Pattern{1, 2};
}

}  // namespace dspattn::cuda::blocks
