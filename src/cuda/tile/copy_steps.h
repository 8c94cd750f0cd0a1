// How far apart the rows lie that a thread copies of tiles of K or V: where tiles exist wholly and no place is empty, a
// thread's rows of any tile lie at the same distances, and the next tile's at one of two.
#pragma once

#include <cstdint>

#include "cuda/tile/key_tiles.h"

namespace dspattn::cuda::tile {

// In bytes, from a thread's first row of a tile to its others, and to that of the next tile: after even, after odd
// ones.
struct CopySteps {
  static constexpr int kRowsApart = 16;  // 128 threads copy 16 rows at once, of 128 bytes each
  static constexpr int kMostRows = 8;    // a thread's, of 128
  std::int64_t row[kMostRows] = {};
  std::int64_t next[2] = {};
};

// key_of(row): the key at a row of part 0 of a span. A span has one or two tiles.
template <int kTileK, typename KeyOf>
constexpr CopySteps copy_steps(const KeyTiles& tiles, std::int64_t row_bytes, KeyOf key_of) {
  static_assert(kTileK <= CopySteps::kRowsApart * CopySteps::kMostRows);
  CopySteps steps;
  for (int i = 0; i < kTileK / CopySteps::kRowsApart; ++i) {
    steps.row[i] = row_bytes * (key_of(i * CopySteps::kRowsApart) - key_of(0));
  }
  for (int tile = 0; tile < 2; ++tile) steps.next[tile] = row_bytes * tiles.step_from(tile);
  return steps;
}
template <TileLayout kLayout, int kTileK>
constexpr CopySteps k_copy_steps(const KeyTiles& tiles, std::int64_t row_bytes) {
  return copy_steps<kTileK>(tiles, row_bytes,
                            [&](int row) { return std::int64_t{key_of_column<kLayout, kTileK>(tiles, 0, row)}; });
}
template <TileLayout kLayout, int kTileK>
constexpr CopySteps v_copy_steps(const KeyTiles& tiles, std::int64_t row_bytes) {
  return copy_steps<kTileK>(tiles, row_bytes,
                            [&](int row) { return std::int64_t{key_of_v_row<kLayout, kTileK, false>(tiles, 0, row)}; });
}

}  // namespace dspattn::cuda::tile
