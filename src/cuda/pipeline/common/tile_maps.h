// Where everything lies in the three-kernel pipeline: which key a place stands for, which place a column of the score
// tile is, which bytes of shared memory a chunk occupies, which metadata word a lane writes. All host-callable, so that
// the layout logic is tested without a GPU.
//
// A *place* is a column of the sparse matrix: group-major, place = group * group_size + element. The score tile is
// computed with its columns permuted so that lane t of a quad owns a run of kTilePlaces / 4 consecutive places. In a
// 16-byte world that run is always the same: 16 bytes of nonzeros and one 16-bit metadata block per row and lane.
#pragma once

#include <cstdint>

#include "dspattn/pattern.h"

namespace dspattn::cuda::pipeline {

inline constexpr int kRowUnit = 32;     // rows of a metadata tile: the encoding interleaves rows by 8 within 32
inline constexpr int kChunkBytes = 16;  // one cp.async, one ldmatrix row, one vector store
inline constexpr int kStepBytes = 32;   // inner extent of one dense mma: 16 elements of 16 bits or 8 of tf32
inline constexpr int kWalkBlock = 128;  // keys and rows of a block where no block mask says otherwise

// Places per tile of the kernels' key loop: 64 of a 16-bit type, 32 of fp32 (each a run of 16 bytes of nonzeros a
// lane).
DSPATTN_HOST_DEVICE constexpr int tile_places(int element_bytes) { return 128 / element_bytes; }
// Places that one 4-byte metadata word (two 16-bit blocks, side by side) stands for per row.
DSPATTN_HOST_DEVICE constexpr int places_per_word_column(int element_bytes) { return 64 / element_bytes; }

// The key, counted from its block's start, of a place counted likewise. group_log2 is 1 or 2.
DSPATTN_HOST_DEVICE constexpr int key_in_block(int place, int group_log2, bool interleaved) {
  if (!interleaved) return place;
  const int element = place & ((1 << group_log2) - 1);
  return element * (kInterleaveBlock >> group_log2) + (place >> group_log2);
}

// The place, within the tile, of column `column` of the score tile. Lane t's accumulators are columns 8b + 2t + {0, 1}.
DSPATTN_HOST_DEVICE constexpr int place_of_column(int column, int element_bytes) {
  const int block = column >> 3;
  const int lane_t = (column & 7) >> 1;
  return lane_t * (tile_places(element_bytes) / 4) + 2 * block + (column & 1);
}

// Tiles are copied with one thread per chunk of a row (rows of more than 32 chunks: per two chunks), all rows of a pass
// at once.
DSPATTN_HOST_DEVICE constexpr unsigned copy_lanes(int chunks) {
  return chunks < 32 ? static_cast<unsigned>(chunks) : 32u;
}
constexpr int rows_per_pass(int threads, int chunks) { return threads / static_cast<int>(copy_lanes(chunks)); }

// How many keys apart the rows are that a thread copies from one pass to the next; 0 when that varies.
constexpr int value_advance(int pass, int group_log2, bool interleaved) {
  if (!interleaved) return pass;
  return pass % (1 << group_log2) == 0 ? pass >> group_log2 : 0;
}

// The same for K tiles, whose rows are columns of the score tile: eight columns on are two places on.
constexpr int key_advance(int pass, int group_log2, bool interleaved) {
  return pass % 8 == 0 ? value_advance(pass / 4, group_log2, interleaved) : 0;
}

// Byte offset of 16-byte chunk `chunk` of row `row` in shared memory. Rows of 128 bytes and more: the chunk index is
// XORed with the row, so that eight rows of one chunk column (an ldmatrix) fall on all 32 banks.
DSPATTN_HOST_DEVICE constexpr int swizzled_wide(int row, int chunk, int row_bytes) {
  return row * row_bytes + ((chunk ^ (row & 7)) * kChunkBytes);
}

// The same for rows of 64 bytes, two to a line of 128.
DSPATTN_HOST_DEVICE constexpr int swizzled_64(int row, int chunk) {
  return row * 64 + ((chunk ^ ((row >> 1) & 3)) * kChunkBytes);
}

// Floats per row of the fp32 V tile: 8 more than a multiple of 32, so that the rows of lanes t = 0..3 fall on disjoint
// quarters of the banks.
DSPATTN_HOST_DEVICE constexpr int padded_floats(int head_dim) { return head_dim + 8; }

// Index of the 4-byte metadata word of rows row32 + 16 * half + g and + 8, and of metadata block `block` (16 places of
// a 16-bit type, 8 of fp32), in a matrix of `rows` padded rows: word columns of two blocks, column-major.
DSPATTN_HOST_DEVICE constexpr std::int64_t metadata_word(std::int64_t rows, std::int64_t row32, int half, int g,
                                                         std::int64_t block) {
  return block / 2 * rows + row32 + 4 * g + 2 * half + block % 2;
}

}  // namespace dspattn::cuda::pipeline
