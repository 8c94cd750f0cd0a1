// The first keys of a block as a row's operand of a sparse product: 1 where the row sees the key, 0 elsewhere
// (blocks/first_means.h).
#pragma once

#include <cstdint>

#include "cuda/ptx/packed_half.h"
#include "cuda/tile/key_map.h"
#include "cuda/tile/select.h"

namespace dspattn::cuda::tile {

// Metadata of a sparse product that takes elements 2 and 3 of every group; kLowerTwoOfFour takes 0 and 1.
inline constexpr std::uint32_t kUpperTwoOfFour = 0xEEEEEEEEu;

// Keys 0 to count - 1 of a block of 128, as lane t of a quad holds them of every fourth group: elements 2 half and
// 2 half + 1. Distances from the middle are halves of small integers, exact in fp16.
struct FirstKeys {
  std::uint32_t distance;  // of group block 0's two keys from the middle of those that are seen
  std::uint32_t step;      // to the next group block
  std::uint32_t reach;     // half of their length; negative: none

  DSPATTN_HOST_DEVICE FirstKeys(const KeyMap& keys, int count, int half, int t) {
    const float middle = 0.5f * static_cast<float>(count - 1);
    const auto from_middle = [&](int element) { return static_cast<float>(keys.key(0, t, element)) - middle; };
    distance = ptx::pack_f16x2(from_middle(2 * half), from_middle(2 * half + 1));
    const auto between = static_cast<float>(4 * keys.group_step);
    step = ptx::pack_f16x2(between, between);
    reach = ptx::pack_f16x2(middle, middle);
  }

  // Of group block m: 0xFFFF in the half of each key that is seen.
  DSPATTN_HOST_DEVICE std::uint32_t seen(int m) const {
    return ptx::within_f16x2(ptx::multiply_add_f16x2(step, m, distance), reach);
  }
};

}  // namespace dspattn::cuda::tile
