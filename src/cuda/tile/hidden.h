// What diagonal, window and key length hide of a block of keys from a warpgroup's rows.
#pragma once

#include <cstdint>

#include "cuda/tile/key_map.h"
#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

// In interleaved groups two elements are keys of the block's lower half and two of its upper half, so that at the
// diagonal, or where the keys end, one half is often hidden from all of a warpgroup's rows (`lower`: nothing of the
// upper half is seen), or seen wholly (`upper`: all of the lower half is seen).
enum class Hidden : std::uint8_t { nothing, lower, upper, anything };

// Of a block that is not wholly seen. `position` is where the first row is on the diagonal and `last` the last key,
// both counted from the block's first key; row i sees the keys from position + i - left to position + i + right.
DSPATTN_HOST_DEVICE constexpr Hidden hidden_of_border(int position, int rows, int last, int left, int right) {
  constexpr int kHalf = kBlockKeys / 2;
  const auto smaller = [](int a, int b) { return a < b ? a : b; };
  if (position + rows - 1 > left) return Hidden::anything;  // the window hides some of the first keys
  if (smaller(position + rows - 1 + right, last) < kHalf) return Hidden::lower;
  return smaller(position + right, last) >= kHalf - 1 ? Hidden::upper : Hidden::anything;
}

// Whether element e of interleaved groups is a key of the block's upper half.
DSPATTN_HOST_DEVICE constexpr bool in_upper_half(Pattern pattern, int e) {
  return (pattern.group == 4 ? e >> 1 : e & 1) != 0;
}

}  // namespace dspattn::cuda::tile
