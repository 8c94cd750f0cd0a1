// Scores with keys as rows: which key stands where, and the selection when a group of four lies in two lanes.
//
// In an accumulator of 64 keys a lane holds rows g and g + 8 of its warp's 16 (g = lane / 4). So those two rows are
// neighbouring elements of a group, 0 and 1 where g < 4 and 2 and 3 beyond: lanes l and l ^ 16 have the group's halves,
// for the same queries. A word holds the scores of one key and two neighbouring queries. Rows 4i .. 4i + 3 are the same
// element of neighbouring groups, and where these are neighbouring keys so are the rows.
#pragma once

#include <cstdint>

#include "cuda/ptx/packed_half.h"
#include "cuda/tile/key_map.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::tile {

// Group and element at a row of a tile of 64 keys.
DSPATTN_HOST_DEVICE constexpr Slot slot_of_key_row(int row) {
  return {row / 16 * 4 + row % 4, 2 * (row % 8 >> 2) + (row % 16 >> 3)};
}
inline constexpr int kLanesApart = 16;  // a group's halves

// As key_map(), but neighbouring groups are of neighbouring keys wherever groups are interleaved.
constexpr KeyMap key_row_map(Pattern pattern, Grouping grouping, int tile_keys) {
  if (grouping == Grouping::interleaved && pattern.group == 2) return {1, tile_keys / 4, 64, tile_keys / 2};
  return key_map(pattern, grouping, tile_keys);
}

// Half of a group: its larger and its smaller score.
struct HalfGroup {
  std::uint32_t high;
  std::uint32_t low;
};
DSPATTN_HOST_DEVICE inline HalfGroup half_group(std::uint32_t first, std::uint32_t second) {
  return {ptx::max_f16x2(first, second), ptx::min_f16x2(first, second)};
}

// 0xFFFF in each half, a query, that keeps the lane's first or second key.
struct KeptHalf {
  std::uint32_t first;
  std::uint32_t second;
};

// Of a lane's half, when `other` is the other lane's. `upper` is ~0 in lanes with elements 2 and 3, else 0: ties keep
// the lower element. The masks are those of keep_two_of_four() (select.h).
DSPATTN_HOST_DEVICE inline KeptHalf keep_two_of_four(std::uint32_t first, std::uint32_t second, const HalfGroup& own,
                                                     const HalfGroup& other, std::uint32_t upper) {
  using namespace ptx;
  constexpr int kOrUnless = 0xF4;  // x | y & ~z
  constexpr int kOrIf = 0xF8;      // x | y & z
  constexpr int kUnless = 0xF1;    // x | ~y & ~z
  constexpr int kIf = 0xF2;        // x | ~y & z
  const std::uint32_t both =
      lop3<kOrUnless>(greater_f16x2(own.low, other.high), greater_equal_f16x2(own.low, other.high), upper);
  const std::uint32_t none =
      lop3<kOrIf>(greater_f16x2(other.low, own.high), greater_equal_f16x2(other.low, own.high), upper);
  const std::uint32_t second_larger = greater_f16x2(second, first);
  return {lop3<kUnless>(both, none, second_larger), lop3<kIf>(both, none, second_larger)};
}

// The larger of the two, as keep_one_of_two().
DSPATTN_HOST_DEVICE inline KeptHalf keep_one_of_two(std::uint32_t first, std::uint32_t second) {
  const std::uint32_t second_larger = ptx::greater_f16x2(second, first);
  return {~second_larger, second_larger};
}

// Query rows of a tile that see a key: rows [begin, begin + count), counted from the tile's first.
struct QueryInterval {
  int begin;
  unsigned count;

  DSPATTN_HOST_DEVICE constexpr bool holds(int row) const { return static_cast<unsigned>(row - begin) < count; }
};
// `key` of the sequence; the tile begins at row `first`.
DSPATTN_HOST_DEVICE constexpr QueryInterval queries_of_key(const RowBand& band, int key, int first) {
  const int begin = key - band.right - band.diagonal;
  const int last = key + band.left - band.diagonal;
  return {begin - first, key < band.key_length && last >= begin ? static_cast<unsigned>(last - begin) + 1 : 0};
}

// The same for two neighbouring rows at once, of a tile of up to 128: both ends as fp16 numbers, which such rows are
// exactly.
struct QueryPairs {
  std::uint32_t begin, end;

  DSPATTN_HOST_DEVICE static QueryPairs of(const QueryInterval& seen) {
    const auto clamped = [](std::int64_t row) { return static_cast<float>(row < 0 ? 0 : row < 128 ? row : 128); };
    const float begin = clamped(seen.begin), end = clamped(std::int64_t{seen.begin} + seen.count);
    return {ptx::pack_f16x2(begin, begin), ptx::pack_f16x2(end, end)};
  }
  // 0xFFFF in each half whose row, an fp16 number, sees the key.
  DSPATTN_HOST_DEVICE std::uint32_t holds(std::uint32_t rows) const {
    return ptx::greater_equal_f16x2(rows, begin) & ~ptx::greater_equal_f16x2(rows, end);
  }
};

}  // namespace dspattn::cuda::tile
