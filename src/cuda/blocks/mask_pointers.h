// Where a thread finds its rows of a mask tensor in global memory.
#pragma once

#include <cstdint>

#include "cuda/blocks/views.h"
#include "cuda/tile/key_map.h"

namespace dspattn::cuda::blocks {

// A thread's two rows of a mask tensor, at a block's first key.
struct MaskPointers {
  const std::uint8_t* row0;
  const std::uint8_t* row1;
  int key_bytes;  // between neighbouring keys

  // Of single rows that exist, at key 0.
  __device__ __forceinline__ MaskPointers(const MaskTensor& mask, int element_bytes, int sequence, int first_head,
                                          int first_row, int second_head, int second_row) {
    const auto at = [&](int head, int row) {
      const std::int64_t offset =
          sequence * mask.batch_stride + head * mask.head_stride + static_cast<std::int64_t>(row) * mask.row_stride;
      return static_cast<const std::uint8_t*>(mask.data) + offset * element_bytes;
    };
    row0 = at(first_head, first_row);
    row1 = at(second_head, second_row);
    key_bytes = static_cast<int>(mask.key_stride) * element_bytes;
  }

  template <typename ItemType>
  __device__ __forceinline__ MaskPointers(const MaskTensor& mask, int element_bytes, const ItemType& item, int row,
                                          int block) {
    const int last = item.rows - 1;  // rows past the end read the last row: their results are not stored
    const auto at = [&](int r) {
      const std::int64_t offset = item.sequence * mask.batch_stride + item.head * mask.head_stride +
                                  (r < last ? r : last) * mask.row_stride +
                                  static_cast<std::int64_t>(block) * tile::kBlockKeys * mask.key_stride;
      return static_cast<const std::uint8_t*>(mask.data) + offset * element_bytes;
    };
    row0 = at(row);
    row1 = at(row + 8);
    key_bytes = static_cast<int>(mask.key_stride) * element_bytes;
  }
};

}  // namespace dspattn::cuda::blocks
