// Which key stands where in a tile of the fused tf32 kernel, whose groups are the pairs of the pattern 1:2.
//
// The tensor core takes pairs as they are (metadata keeps one of two neighbouring keys), and the kernel transposes V
// itself, so the order of keys is free as long as three things agree: the columns of the scores, the order of the kept
// weights in a sparse A operand, and the columns of V transposed. In the accumulator of the score product, lane t of a
// quad holds columns 8j + 2t + {0,1} of register block j. So the K tile holds the first keys of all its pairs in its
// first half and the second keys in its second half: pair u = 8j + 2t + i is in lane t, blocks j and keys/16 + j. Each
// half is a plain box of rows, a fixed distance apart, for which TMA checks bounds.
//
// Step j of the output product then takes pairs 8j + 2t (i = 0) as its first 8 keys and 8j + 2t + 1 as its second 8:
// lane t's weight stands for columns 16j + 8i + 2t + {0,1} of V transposed.
#pragma once

#include <cstdint>

#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/single.h"
#include "cuda/tile/key_map.h"
#include "cuda/tile/select.h"
#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

// Keys of pair u of tile `part` of a block: KeyMap::key(part, u, element), elements 0 and 1.
constexpr KeyMap pair_map(Grouping grouping, int tile_keys) {
  if (grouping == Grouping::consecutive) return {2, 0, 1, tile_keys};
  return {1, 0, kBlockKeys / 2, tile_keys / 2};
}

// Pair (as `group`) and element at a row of the K tile, and at a column of the transposed V tile.
DSPATTN_HOST_DEVICE constexpr Slot pair_of_k_row(int row, int tile_keys) {
  const int half = row >= tile_keys / 2 ? 1 : 0;
  return {row - half * (tile_keys / 2), half};
}
DSPATTN_HOST_DEVICE constexpr Slot pair_of_v_column(int column) {
  const int step = column >> 4;
  const int i = (column >> 3) & 1;
  const int t = (column >> 1) & 3;
  return {8 * step + 2 * t + i, column & 1};
}

// Accumulator register that holds element e of pair 8j + 2t + i, row g (row g + 8: two further).
DSPATTN_HOST_DEVICE constexpr int pair_register(int j, int i, int e, int tile_keys) {
  return 4 * (j + e * (tile_keys / 16)) + i;
}

// Which weight register (of 4 a step) row g's (upper = 0) or row g + 8's (1) weight of pair 8j + 2t + i goes to.
DSPATTN_HOST_DEVICE constexpr int weight_register(int j, int i, int upper) { return 4 * j + 2 * i + upper; }

// What was kept of one pair, for two rows: the larger values (NaN if either is), and 16-bit masks where it is the
// second. Ties keep the first.
struct KeptOfPair {
  float row0, row1;
  std::uint32_t second;  // low half: row g, high half: row g + 8
};
DSPATTN_HOST_DEVICE inline KeptOfPair keep_one(float first0, float second0, float first1, float second1) {
  return {ptx::max_nan(first0, second0), ptx::max_nan(first1, second1),
          ptx::permute_bytes(ptx::greater(second0, first0), ptx::greater(second1, first1), 0x5410u)};
}

// Metadata of a lane's four pairs (i = 0, 1 of two steps): nibble p of the low (high) half says which key of pair p row
// g (g + 8) keeps. To the tensor core a tf32 value is two 16-bit ones: 0x4 (0 and 1) is the first, 0xE (2 and 3) the
// second. QuadTranspose then gathers the four lanes' nibbles of pair index p in lane p.
DSPATTN_HOST_DEVICE inline std::uint32_t metadata_of_pairs(const std::uint32_t (&second)[4]) {
  return ptx::lop3<0xEA>(merge_nibbles(second[0], second[1], second[2], second[3]), 0xAAAAAAAAu, 0x44444444u);
}

// Transposing V: 128 threads share a tile. A warp takes patches of 16 columns (keys) x 32 rows (of the head dim): its
// patches have the same columns, and every panel_step(keys)-th panel of 32 rows from the first on. In a patch a lane
// takes four keys, one 16-byte chunk of V transposed, of four neighbouring rows. Lanes are dealt such that eight in a
// row read from different banks of raw V, and write to different banks of V transposed: they have four chunks each of
// two groups of rows whose numbers differ in bits 0 and 1.
struct TransposeShare {
  int chunk;  // columns 4 chunk ... 4 chunk + 3 of V transposed
  int row;    // rows row ... row + 3 of patch 0: columns of V
};
DSPATTN_HOST_DEVICE constexpr TransposeShare transpose_share(int thread, int tile_keys) {
  const int warp = thread >> 5;
  const int lane = thread & 31;
  const int group = (lane >> 2 & 1) * 3 ^ (lane >> 3 & 1) ^ (lane >> 4 & 1) * 4;  // of four rows
  return {4 * (warp % (tile_keys / 16)) + (lane & 3), 32 * (warp / (tile_keys / 16)) + 4 * group};
}
DSPATTN_HOST_DEVICE constexpr int panel_step(int tile_keys) { return 64 / tile_keys; }

// Byte offset, in raw V, as TMA loads it (rows in the order of K, panels of 32 columns), of the four values from column
// `column` on of key x of a chunk.
DSPATTN_HOST_DEVICE constexpr int raw_offset(int chunk, int x, int column, int tile_keys) {
  const int pair = pair_of_v_column(4 * chunk).group;
  // A pair two further: bit 1 of the row's number is free.
  const int first = (column >> 5) * tile_keys * 128 + swizzled_offset(pair, column >> 2 & 7);
  return (first ^ (x >> 1) << 5) + (x >> 1) * 256 + (x & 1) * (tile_keys / 2) * 128;
}

// The four columns of a chunk are both keys of two pairs, two apart: key x of a chunk lies this many keys past its
// first, whichever the chunk.
DSPATTN_HOST_DEVICE constexpr int key_distance(const KeyMap& map, int x) {
  return (x >> 1) * 2 * map.group_step + (x & 1) * map.pair_step;
}

// Byte offset of 16-byte chunk `chunk` (columns 4 chunk ...) of row `row` in a transposed V tile of `rows` rows, stored
// in panels of 32 columns with the 128-byte swizzle.
DSPATTN_HOST_DEVICE constexpr int transposed_offset(int row, int chunk, int rows) {
  return (chunk >> 3) * rows * 128 + swizzled_offset(row, chunk & 7);
}

// The same chunk `count` < 4 rows below an offset of a row divisible by four: bits 4 and 5 change besides.
DSPATTN_HOST_DEVICE constexpr int rows_further(int offset, int count) { return (offset ^ (count << 4)) + count * 128; }

}  // namespace dspattn::cuda::tile
