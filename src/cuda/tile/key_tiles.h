// Which keys stand where in a tile of the general kernel: as many tiles as a row of keys needs, each of whole groups.
//
// A tile of kTileK columns is one of 2^parts_log2 that together cover a span of keys. In the accumulator of the score
// product lane t of a quad holds columns 8b + 2t + {0, 1} of register block b; which keys these are is chosen such that
// a group meets in one lane, or where it is larger than a lane's share, in neighbouring lanes:
//   fours   groups of four as the sparse tensor core takes 16-bit values (key_map.h)
//   pairs   pairs as it takes tf32 values (pair_map.h)
//   places  any group. Lane t's columns, in ascending order, are places t * kTileK/4 ... of the tile, and a group has
//           as many places as the next power of two above its keys; those beyond its keys are empty.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/tile/key_map.h"
#include "cuda/tile/pair_map.h"
#include "cuda/tile/tile_range.h"
#include "cuda/tile/walk.h"
#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

enum class TileLayout : std::uint8_t { fours, pairs, places };

struct KeyTiles {
  KeyMap keys;          // of an element of a group of a tile, counted from the span's first
  int group = 1;        // keys of a group
  int places_log2 = 0;  // places of a group
  int span = 64;        // keys
  int parts_log2 = 0;   // tiles of a span
  int span_log2 = -1;   // where it is a power of two: division would take 25 instructions one after the other

  // Of a tile, counted from the row's first: its part of the span, and the span's first key.
  DSPATTN_HOST_DEVICE constexpr int part(int tile) const { return tile & ((1 << parts_log2) - 1); }
  DSPATTN_HOST_DEVICE constexpr int first_key(int tile) const { return (tile >> parts_log2) * span; }
  // Of the whole spans in so many keys: the tiles.
  DSPATTN_HOST_DEVICE constexpr int tiles_within(int count) const {
    return (span_log2 >= 0 ? count >> span_log2 : count / span) << parts_log2;
  }
  // Keys from a tile's first part of a group to the next tile's.
  DSPATTN_HOST_DEVICE constexpr int step_from(int tile) const {
    const int parts = 1 << parts_log2;
    return part(tile) == parts - 1 ? span - (parts - 1) * keys.part_step : keys.part_step;
  }
  // No place is empty: rows of a tile lie where the sums of their bits' keys say.
  DSPATTN_HOST_DEVICE constexpr bool is_filled() const { return group == 1 << places_log2; }
};

// Rounded up.
constexpr int log2_of(int x) { return static_cast<int>(std::bit_width(static_cast<unsigned>(x) - 1)); }

constexpr KeyTiles unmeasured_key_tiles(TileLayout layout, Pattern pattern, Grouping grouping, int tile_keys) {
  const bool consecutive = grouping == Grouping::consecutive;
  if (layout != TileLayout::places) {
    const KeyMap keys =
        layout == TileLayout::fours ? key_map(pattern, grouping, tile_keys) : pair_map(grouping, tile_keys);
    return {keys, 4, 2, consecutive ? tile_keys : kBlockKeys, consecutive ? 0 : log2_of(kBlockKeys / tile_keys)};
  }
  if (pattern.is_dense()) return {{1, 0, 0, 0}, 1, 0, tile_keys, 0};
  const int places_log2 = log2_of(pattern.group);
  if (consecutive) {
    return {{pattern.group, 2, 1, 0}, pattern.group, places_log2, (tile_keys >> places_log2) * pattern.group, 0};
  }
  const int step = kBlockKeys / pattern.group;
  return {{1, 2 * step, step, tile_keys / pattern.group},
          pattern.group,
          places_log2,
          kBlockKeys,
          log2_of(kBlockKeys / tile_keys)};
}

constexpr KeyTiles key_tiles(TileLayout layout, Pattern pattern, Grouping grouping, int tile_keys) {
  KeyTiles tiles = unmeasured_key_tiles(layout, pattern, grouping, tile_keys);
  if ((tiles.span & (tiles.span - 1)) == 0) tiles.span_log2 = log2_of(tiles.span);
  return tiles;
}

// Key at a row of the K tile (a column of the scores), counted from the span's first; negative: an empty place.
template <TileLayout kLayout, int kTileK>
DSPATTN_HOST_DEVICE constexpr int key_of_column(const KeyTiles& tiles, int part, int column) {
  if constexpr (kLayout == TileLayout::fours) {
    const Slot slot = slot_of_k_row(column, kTileK);
    return tiles.keys.key(part, slot.group, slot.element);
  } else if constexpr (kLayout == TileLayout::pairs) {
    const Slot slot = pair_of_k_row(column, kTileK);
    return tiles.keys.key(part, slot.group, slot.element);
  } else {
    const int place = (column >> 1 & 3) * (kTileK / 4) + 2 * (column >> 3) + (column & 1);
    const int element = place & ((1 << tiles.places_log2) - 1);
    if (element >= tiles.group) return -1;
    return tiles.keys.key(part, place >> tiles.places_log2, element);
  }
}

// Where keys are the rows of scores (mma.m16n8, 32 keys) a lane holds rows g, g + 8, g + 16, g + 24 (g = lane / 4) of
// each query. Those are four neighbouring places of the layout `places`: the column that stands at a row. A lane has
// then whole groups of two and of four, and selects without asking another.
DSPATTN_HOST_DEVICE constexpr int column_of_key_row(int row) {
  const int g = row & 7, place = row >> 3;
  return 16 * (g >> 2) + 8 * (place >> 1) + 2 * (g & 3) + (place & 1);
}

// Key at a row of the V tile. kSplits: as the A operand of a dense tf32 product takes scores, of eight columns first
// columns 2t, then columns 2t + 1; otherwise `places` has V in the order of the columns.
template <TileLayout kLayout, int kTileK, bool kSplits>
DSPATTN_HOST_DEVICE constexpr int key_of_v_row(const KeyTiles& tiles, int part, int row) {
  if constexpr (kLayout == TileLayout::fours) {
    const Slot slot = slot_of_v_row(row);
    return tiles.keys.key(part, slot.group, slot.element);
  } else if constexpr (kLayout == TileLayout::pairs) {
    const Slot slot = pair_of_v_column(row);
    return tiles.keys.key(part, slot.group, slot.element);
  } else {
    const int column = kSplits ? (row & ~7) + 2 * (row & 3) + (row >> 2 & 1) : row;
    return key_of_column<kLayout, kTileK>(tiles, part, column);
  }
}

// The tiles that any of rows [first, last] sees.
DSPATTN_HOST_DEVICE constexpr TileRange visible_tiles(const KeyTiles& tiles, const RowBand& band, int first, int last) {
  if (last < first) return {0, 0};
  const int begin = band.begin(first);
  const int end = band.end(last);
  if (end <= begin) return {0, 0};
  return {tiles.tiles_within(begin), tiles.tiles_within(end + tiles.span - 1)};
}

// The tiles all of whose keys all of rows [first, last] see: no masking there. None where places are empty.
DSPATTN_HOST_DEVICE constexpr TileRange interior_tiles(const KeyTiles& tiles, const RowBand& band, int first,
                                                       int last) {
  if (last < first || !tiles.is_filled()) return {0, 0};
  const int begin = tiles.tiles_within(band.begin(last) + tiles.span - 1);
  const int end = band.end(first) > 0 ? tiles.tiles_within(band.end(first)) : 0;
  return end > begin ? TileRange{begin, end} : TileRange{0, 0};
}

// All keys of the span that begins with first_key are seen by all of rows [first, last]: no masking there.
DSPATTN_HOST_DEVICE constexpr bool sees_span(const KeyTiles& tiles, const RowBand& band, int first_key, int first,
                                             int last) {
  return tiles.is_filled() && band.begin(last) <= first_key && band.end(first) >= first_key + tiles.span;
}

// Row tiles, of tile_q rows each, of a sequence of `rows` rows, that see any of keys [first_key, end_key).
DSPATTN_HOST_DEVICE constexpr TileRange row_tiles_that_see(const RowBand& band, int rows, int first_key, int end_key,
                                                           int tile_q) {
  const int end = end_key < band.key_length ? end_key : band.key_length;
  if (end <= first_key || rows <= 0) return {0, 0};
  const int first_row = first_key - band.diagonal - band.right;  // that sees the first key
  const int last_row = end - 1 - band.diagonal + band.left;      // that sees the last one
  if (first_row >= rows || last_row < 0) return {0, 0};
  const int last = last_row < rows ? last_row : rows - 1;
  return {first_row > 0 ? first_row / tile_q : 0, last / tile_q + 1};
}

}  // namespace dspattn::cuda::tile
