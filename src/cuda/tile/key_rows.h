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

// Half of a group: its larger and its smaller score; in lanes with elements 2 and 3 those of the scores times -1. Then
// whether a smaller score of one lane is at least the larger one of the other is, in either lane, whether the sum of
// their `low` is at least 0: so both find it out by the same comparison of what is their own with what is not.
struct HalfGroup {
  std::uint32_t high;
  std::uint32_t low;
};
// `upper` is ~0 in lanes with elements 2 and 3, else 0.
DSPATTN_HOST_DEVICE inline HalfGroup half_group(std::uint32_t first, std::uint32_t second, std::uint32_t upper) {
  const std::uint32_t sign = upper != 0 ? 0xBC00BC00u : 0x3C003C00u;  // -1 or 1, twice
  const std::uint32_t a = ptx::multiply_f16x2(first, sign), b = ptx::multiply_f16x2(second, sign);
  return {ptx::max_f16x2(a, b), ptx::min_f16x2(a, b)};
}

// 0xFFFF in each half, a query, that keeps the lane's first or second key.
struct KeptHalf {
  std::uint32_t first;
  std::uint32_t second;
};

// Of a lane's half, when `other` is the other lane's. Ties keep the lower element. The masks are those of
// keep_two_of_four() (select.h).
DSPATTN_HOST_DEVICE inline KeptHalf keep_two_of_four(std::uint32_t first, std::uint32_t second, const HalfGroup& own,
                                                     const HalfGroup& other, std::uint32_t upper) {
  using namespace ptx;
  // In lower lanes: low >= the other's high, so both stay; high >= the other's low, so one stays at least. In upper
  // lanes, whose answers are the other way around: the other's high > low, so one goes at least ... both stay.
  const std::uint32_t x = greater_equal_minus_f16x2(own.low, other.low, upper);
  const std::uint32_t y = greater_equal_minus_f16x2(own.high, other.high, upper);
  const std::uint32_t second_larger = greater_f16x2(second, first);
  constexpr int kMajority = 0xE8, kMajorityUnless = 0xD4;  // of x, y and z; of x, y and ~z
  return {lop3<kMajorityUnless>(x, y, second_larger), lop3<kMajority>(x, y, second_larger)};
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
