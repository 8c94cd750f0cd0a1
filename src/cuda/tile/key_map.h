// Which key stands where in a tile of the fused kernel.
//
// A sparse tensor-core product wants the four keys of a group in one lane. In the accumulator of the score product,
// lane t of a quad holds columns 8m + 2t + {0,1} of register block m. So a tile of `keys` keys holds its group u = 4m +
// t at the K rows (columns of the scores) 2u, 2u+1 and keys/2 + 2u, keys/2 + 2u+1: elements 0..3 of the group, all in
// lane t, blocks m and keys/16 + m. The V tile holds the group at rows 4u..4u+3, which is what the sparsity metadata
// indexes.
//
// Which keys a group's elements are is a matter of strides only, so both groupings and both patterns share one kernel.
// A group here is always four keys, as the hardware's 2:4 wants it: of a 1:2 problem it holds two pairs.
#pragma once

#include <cstdint>

#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

inline constexpr int kBlockKeys = kInterleaveBlock;  // tiles never straddle a block of 128 keys

// Key (within its block of 128) of element e of group u of tile `part` of the block:
//   part * part_step + u * group_step + (e / 2) * half_step + (e % 2) * pair_step
struct KeyMap {
  int group_step = 1;
  int half_step = 64;
  int pair_step = 32;
  int part_step = 0;  // tiles of 64 keys: the second tile of a block starts this many keys later

  DSPATTN_HOST_DEVICE constexpr int key(int part, int group, int element) const {
    return part * part_step + group * group_step + (element >> 1) * half_step + (element & 1) * pair_step;
  }
};

constexpr KeyMap key_map(Pattern pattern, Grouping grouping, int tile_keys) {
  if (grouping == Grouping::consecutive) return {4, 2, 1, tile_keys};
  if (pattern.group == 4) return {1, 64, 32, tile_keys / 4};
  return {2, 1, 64, tile_keys / 2};  // pairs (k, k + 64); two neighbouring pairs fill one group
}

// A key's index as counted from a block's first key, or the nearest end of the block.
DSPATTN_HOST_DEVICE constexpr int clamp_to_block(int x) { return x < 0 ? 0 : x < kBlockKeys ? x : kBlockKeys; }

// Group and element at a row of the K tile, and of the V tile.
struct Slot {
  int group;
  int element;
};
DSPATTN_HOST_DEVICE constexpr Slot slot_of_k_row(int row, int tile_keys) {
  const int half = row >= tile_keys / 2 ? 1 : 0;
  const int in_half = row - half * (tile_keys / 2);
  return {in_half >> 1, 2 * half + (in_half & 1)};
}
DSPATTN_HOST_DEVICE constexpr Slot slot_of_v_row(int row) { return {row >> 2, row & 3}; }

// Byte offset of 16-byte chunk `chunk` (0..7) of a 128-byte row in the 128-byte swizzle: chunks are permuted within
// groups of eight rows so that eight rows' equal chunks lie in different banks.
DSPATTN_HOST_DEVICE constexpr int swizzled_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Key-tile column of accumulator register `index` of a lane (t = lane % 4), and its row within the warp's 16.
DSPATTN_HOST_DEVICE constexpr int accumulator_column(int index, int t) {
  return 8 * (index >> 2) + 2 * t + (index & 1);
}
DSPATTN_HOST_DEVICE constexpr int accumulator_row(int index, int lane) { return (lane >> 2) + 8 * ((index >> 1) & 1); }

}  // namespace dspattn::cuda::tile
