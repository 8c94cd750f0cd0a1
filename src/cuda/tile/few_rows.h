// Few query rows: how the rows of the heads that share a key head stand side by side, how a range of keys is dealt to
// CTAs, and which two of four keys stay. Host functions too.
#pragma once

#include <cstdint>

#include "cuda/tile/divisor.h"
#include "cuda/tile/key_map.h"
#include "cuda/tile/tile_range.h"

namespace dspattn::cuda::tile {

// Row r of those of a key head: all queries of its first head, then of the next.
struct PackedRow {
  int head = 0;  // of the heads that share the key head
  int query = 0;
};
DSPATTN_HOST_DEVICE constexpr PackedRow packed_row(int row, int n_q) { return {row / n_q, row % n_q}; }

// Part `split` of `splits` of a range: sizes differ by at most one, and an empty part is possible. Groups of keys never
// straddle tiles, so parts can be merged exactly wherever they are cut.
DSPATTN_HOST_DEVICE constexpr TileRange part_of_range(TileRange range, int split, const Divisor& splits) {
  const int each = splits.quotient(range.end - range.begin);
  const int more = range.end - range.begin - each * splits.value;  // of the first parts have one more
  const int begin = range.begin + each * split + (split < more ? split : more);
  return {begin, begin + each + (split < more ? 1 : 0)};
}

// Row of 16 of a K tile, four groups, that column `column` of accumulator `which` (0 or 1) of the score product is of,
// so that lane t of a quad has all of group t: elements 0 and 1 in one accumulator, 2 and 3 in the other, the last two
// groups the other way round. Then the eight rows of either lie in different banks.
DSPATTN_HOST_DEVICE constexpr int row_of_column(int which, int column) {
  const int group = column >> 1;
  return 4 * group + 2 * (which ^ (group >> 1)) + (column & 1);
}

// Which two of a group's four keys are kept, ascending.
struct KeptOfFour {
  int first = 0;
  int second = 1;
};

// The two largest; ties keep the lower. Nothing is promised where there is a NaN, but that first < second.
DSPATTN_HOST_DEVICE constexpr KeptOfFour two_of_four(float a, float b, float c, float d) {
  const bool b_over_a = b > a;
  const bool d_over_c = d > c;
  const float high1 = b_over_a ? b : a, low1 = b_over_a ? a : b;
  const float high2 = d_over_c ? d : c, low2 = d_over_c ? c : d;
  if (low1 >= high2) return {0, 1};
  if (low2 > high1) return {2, 3};
  return {b_over_a ? 1 : 0, d_over_c ? 3 : 2};
}

// The larger of the first two and the larger of the last two.
DSPATTN_HOST_DEVICE constexpr KeptOfFour one_of_each_two(float a, float b, float c, float d) {
  return {b > a ? 1 : 0, d > c ? 3 : 2};
}

// The same two as conditions, without branches, for who picks of several fours alike.
struct ChosenOfFour {
  bool b_over_a = false, d_over_c = false;
  bool both_low = false, both_high = false;  // of 2:4 alone

  template <typename Value>
  DSPATTN_HOST_DEVICE constexpr Value first(const Value (&x)[4]) const {
    const Value larger = b_over_a ? x[1] : x[0];
    return both_low ? x[0] : both_high ? x[2] : larger;
  }
  template <typename Value>
  DSPATTN_HOST_DEVICE constexpr Value second(const Value (&x)[4]) const {
    const Value larger = d_over_c ? x[3] : x[2];
    return both_low ? x[1] : both_high ? x[3] : larger;
  }
  // The others' sum.
  DSPATTN_HOST_DEVICE constexpr float left_out(const float (&x)[4]) const {
    const float a = b_over_a ? x[0] : x[1], c = d_over_c ? x[2] : x[3];
    return both_low ? x[2] + x[3] : both_high ? x[0] + x[1] : a + c;
  }
  // kept_code() of both, neither hidden.
  DSPATTN_HOST_DEVICE constexpr std::uint32_t code() const {
    const std::uint32_t either = (b_over_a ? 1u : 0u) | (d_over_c ? 12u : 8u);
    return both_low ? 4u : both_high ? 14u : either;
  }
};
DSPATTN_HOST_DEVICE constexpr ChosenOfFour choose_of_four(const float (&x)[4], bool pairs) {
  const bool b_over_a = x[1] > x[0], d_over_c = x[3] > x[2];
  const float high1 = b_over_a ? x[1] : x[0], low1 = b_over_a ? x[0] : x[1];
  const float high2 = d_over_c ? x[3] : x[2], low2 = d_over_c ? x[2] : x[3];
  return {b_over_a, d_over_c, !pairs && low1 >= high2, !pairs && low2 > high1};
}

// What is remembered of a group: both kept elements as the sparse tensor core wants them (index0 | index1 << 2), and
// whether they are hidden, so that their rows of V are not to be read.
DSPATTN_HOST_DEVICE constexpr std::uint32_t kept_code(KeptOfFour kept, bool first_hidden, bool second_hidden) {
  return static_cast<std::uint32_t>(kept.first | kept.second << 2 | (first_hidden ? 16 : 0) | (second_hidden ? 32 : 0));
}
DSPATTN_HOST_DEVICE constexpr int kept_element(std::uint32_t code, int which) {
  return static_cast<int>(code >> (2 * which) & 3u);
}
DSPATTN_HOST_DEVICE constexpr bool kept_is_hidden(std::uint32_t code, int which) {
  return (code >> (4 + which) & 1u) != 0;
}

// Sparsity metadata of four groups from their codes, a byte each.
DSPATTN_HOST_DEVICE constexpr std::uint32_t metadata_of_codes(std::uint32_t codes) {
  const std::uint32_t nibbles = codes & 0x0F0F0F0Fu;
  const std::uint32_t bytes = nibbles | nibbles >> 4;  // of each pair of groups, in bytes 0 and 2
  return (bytes & 0xFFu) | (bytes >> 8 & 0xFF00u);
}

}  // namespace dspattn::cuda::tile
