// Sums of V over blocks of 128 keys that the caller keeps (dspattn/value_sums.h): which of them an update writes, and
// which a row's mean is made of. Host functions too.
#pragma once

#include "cuda/tile/means.h"

namespace dspattn::cuda::tile {

// Rows of the sums: of a block alone, and of all blocks up to it.
DSPATTN_HOST_DEVICE constexpr int row_of_block(int block) { return 2 * block; }
DSPATTN_HOST_DEVICE constexpr int row_of_blocks_to(int block) { return 2 * block + 1; }

// The whole blocks of a sequence of `length` keys that have one of its last `new_keys`.
DSPATTN_HOST_DEVICE constexpr KeyBlockRange blocks_to_sum(int length, int new_keys) {
  const int first = length > new_keys ? length - new_keys : 0;
  return {first / kBlockKeys, length / kBlockKeys};
}
// How many these are at most, of n_k keys.
DSPATTN_HOST_DEVICE constexpr int most_blocks_to_sum(int n_k, int new_keys) {
  if (new_keys == 0) return 0;
  const int all = n_k / kBlockKeys, touched = (new_keys + kBlockKeys - 2) / kBlockKeys + 1;
  return all < touched ? all : touched;
}

// What the mean of V of a row is made of that sees `keys`: rows of the sums, every second one; and where these count no
// key, the keys before and after the whole blocks, by themselves.
struct MeanParts {
  int first_row = 0, rows = 0;
  KeyInterval before, after;
};

DSPATTN_HOST_DEVICE constexpr MeanParts mean_parts(const KeyInterval& keys) {
  const KeyBlockRange whole = whole_blocks(keys);
  if (whole.end <= whole.begin) return {0, 0, keys, {keys.end, keys.end}};
  MeanParts parts{
      row_of_blocks_to(whole.end - 1), 1, {keys.begin, whole.begin * kBlockKeys}, {whole.end * kBlockKeys, keys.end}};
  if (whole.begin > 0) {
    parts.first_row = row_of_block(whole.begin);
    parts.rows = whole.end - whole.begin;
  }
  return parts;
}

}  // namespace dspattn::cuda::tile
