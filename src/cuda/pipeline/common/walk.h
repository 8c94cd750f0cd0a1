// Which key blocks a block row visits. One walk serves all three kernels, so that what one writes is what the next
// reads. A slot is a block's position in the stored matrix: with a block mask (blocked-ELL) slot s of block row r holds
// key block columns[r][s]; without one, slot and key block are the same.
#pragma once

#include <cstdint>

#include "core/geometry.h"
#include "cuda/pipeline/common/tile_maps.h"

namespace dspattn::cuda::pipeline {

struct SlotRange {
  int begin = 0;
  int end = 0;
};

struct BlockWalk {
  const std::int32_t* columns = nullptr;      // [block_rows, width]; null: every key block
  const std::int32_t* counts = nullptr;       // [block_rows], blocks of each row; null with columns
  const std::int32_t* key_lengths = nullptr;  // [batch]; null: n_k
  std::int64_t key_length_stride = 1;
  core::Band band;
  std::int64_t n_q = 0;
  std::int64_t n_k = 0;
  int width = 0;
  int block = kWalkBlock;    // rows and keys of a block: 64 or 128
  int key_blocks = 0;        // ceil(n_k / block)
  bool skip_masked = false;  // leave out key blocks that the band or the key length masks for every row of the block
                             // row: only where nobody looks at the stored matrix

  DSPATTN_HOST_DEVICE constexpr std::int64_t key_length(std::int64_t batch) const {
    if (key_lengths == nullptr) return n_k;
    const std::int64_t length = key_lengths[batch * key_length_stride];
    return length < 0 ? 0 : (length < n_k ? length : n_k);
  }

  DSPATTN_HOST_DEVICE constexpr SlotRange slots(int row_block, std::int64_t batch) const {
    if (columns != nullptr) return {0, counts[row_block]};
    if (!skip_masked) return {0, key_blocks};
    const std::int64_t first = static_cast<std::int64_t>(row_block) * block;
    std::int64_t last = first + block - 1;
    if (last > n_q - 1) last = n_q - 1;
    const std::int64_t length = key_length(batch);
    // Both ends of a row's range grow with the row: the block row sees from its first row's begin to its last's end.
    const std::int64_t begin = band.row(first, n_q, n_k, length).begin / block;
    const std::int64_t end = (band.row(last, n_q, n_k, length).end + block - 1) / block;
    SlotRange range;
    range.begin = static_cast<int>(begin < key_blocks ? begin : key_blocks);
    range.end = static_cast<int>(end < key_blocks ? end : key_blocks);
    if (range.end < range.begin) range.end = range.begin;
    return range;
  }

  // A tile of the kernels' key loop is a part of a slot's block. kTile is 32 or 64 places.
  template <int kTile>
  DSPATTN_HOST_DEVICE constexpr int tiles_log2() const {
    return (block == 128 ? 7 : 6) - (kTile == 64 ? 6 : 5);
  }
  template <int kTile>
  DSPATTN_HOST_DEVICE constexpr int slot_of_tile(int tile) const {
    return tile >> tiles_log2<kTile>();
  }
  template <int kTile>
  DSPATTN_HOST_DEVICE constexpr int place_in_block(int tile) const {
    return (tile & ((1 << tiles_log2<kTile>()) - 1)) * kTile;
  }

  DSPATTN_HOST_DEVICE constexpr int key_block(int row_block, int slot) const {
    return columns == nullptr ? slot : columns[static_cast<std::int64_t>(row_block) * width + slot];
  }
};

}  // namespace dspattn::cuda::pipeline
