// What TMA needs to know of a tensor, and whether it can address it at all. No CUDA header: plans ask on any machine.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "cuda/blocks/views.h"
#include "cuda/tile/key_map.h"
#include "cuda/tile/mask_map.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::blocks {

// Extents of a [batch, heads, rows, columns] tensor.
struct Extents {
  std::int64_t batch, heads, rows, columns;
};

// A box of a tensor of kRank dimensions, the first of which is contiguous.
template <std::size_t kRank>
struct TmaShape {
  const void* data;
  std::array<std::int64_t, kRank> dims;
  std::array<std::int64_t, kRank - 1> stride_bytes;  // of dimension 1 and so on
  std::array<int, kRank> box;                        // elements from the first to past the last
  std::array<int, kRank> steps;                      // every so many of them
};

inline std::int64_t element_bytes_of(DType type) { return static_cast<std::int64_t>(size_bytes(type)); }

// Columns of a box: 128 bytes, one row of the swizzle.
inline int box_columns(DType type) { return 128 / static_cast<int>(size_bytes(type)); }

// The limits of CUtensorMap (CUDA driver API, cuTensorMapEncodeTiled). least_stride: 0 where rows may repeat.
template <std::size_t kRank>
std::optional<TmaShape<kRank>> addressable(TmaShape<kRank> shape, std::int64_t least_stride = 1) {
  if (shape.data == nullptr || reinterpret_cast<std::uintptr_t>(shape.data) % 16 != 0) return std::nullopt;
  for (std::size_t i = 0; i < kRank; ++i) {
    if (shape.dims[i] < 1 || shape.dims[i] > (std::int64_t{1} << 32)) return std::nullopt;
    if (i == 0) continue;
    std::int64_t& stride = shape.stride_bytes[i - 1];
    if (stride % 16 != 0) return std::nullopt;
    if (shape.dims[i] == 1) stride = 16;  // never used, but must be valid
    if (stride < least_stride || stride >= (std::int64_t{1} << 40)) return std::nullopt;
  }
  return shape;
}

// (column, row, head, batch), boxes of 128 bytes of columns x `rows` rows, every row_step-th. Rows past the tensor's
// end are filled with zeros.
inline std::optional<TmaShape<4>> rows_shape(const RowsView& tensor, const Extents& extents, DType type, int rows,
                                             int row_step) {
  const std::int64_t bytes = element_bytes_of(type);
  return addressable(TmaShape<4>{tensor.data,
                                 {extents.columns, extents.rows, extents.heads, extents.batch},
                                 {tensor.row_stride * bytes, tensor.head_stride * bytes, tensor.batch_stride * bytes},
                                 {box_columns(type), rows * row_step, 1, 1},
                                 {1, row_step, 1, 1}});
}

// K and V permute the keys of a tile into groups (tile/key_map.h) on the way. Both are (column, element, row, head,
// batch), where a step of `element` moves by some rows and a step of `row` by one: the two overlap, so a tile may start
// at any row, as packed sequences need. A box may only be read where all its rows exist: the bound on `row` does not
// see the rows that `element` adds. The caller loads partial blocks otherwise.
inline std::optional<TmaShape<5>> keys_shape(const RowsView& tensor, const Extents& extents, DType type, int elements,
                                             int element_rows, int row_box, int row_step) {
  const std::int64_t bytes = element_bytes_of(type);
  const std::int64_t row = tensor.row_stride * bytes;
  return addressable(TmaShape<5>{tensor.data,
                                 {extents.columns, elements, extents.rows, extents.heads, extents.batch},
                                 {element_rows * row, row, tensor.head_stride * bytes, tensor.batch_stride * bytes},
                                 {box_columns(type), elements, row_box, 1, 1},
                                 {1, 1, row_step, 1, 1}});
}

// One half of a K tile: pairs of keys pair_step apart, one pair a group.
inline std::optional<TmaShape<5>> k_shape(const RowsView& tensor, const Extents& extents, DType type,
                                          const tile::KeyMap& keys, int tile_k) {
  return keys_shape(tensor, extents, type, 2, keys.pair_step, keys.group_step * tile_k / 4, keys.group_step);
}

// Rows of V in group order. Consecutive groups: as they lie. Otherwise the elements that are not neighbours form the
// inner dimension: all four (2:4), or the two of each pair (1:2).
inline std::optional<TmaShape<5>> v_shape(const RowsView& tensor, const Extents& extents, DType type,
                                          const tile::KeyMap& keys, int tile_k) {
  if (keys.pair_step == 1) return keys_shape(tensor, extents, type, 1, 1, tile_k, 1);
  const int elements = keys.half_step == 1 ? 2 : 4;
  return keys_shape(tensor, extents, type, elements, keys.pair_step, tile_k / elements, 1);
}

// A mask tensor of the whole problem's extents [batch, heads, n_q, n_k]: (key, row, head, batch), boxes of 128 bytes of
// keys x 64 rows (tile/mask_map.h). One that is the same for all heads or sequences is asked for as the first one's;
// rows repeat by their stride.
inline std::optional<TmaShape<4>> mask_shape(const MaskTensor& mask, const Extents& extents, int element_bytes) {
  if (mask.key_stride != 1) return std::nullopt;
  return addressable(TmaShape<4>{mask.data,
                                 {extents.columns, extents.rows, mask.head_stride == 0 ? 1 : extents.heads,
                                  mask.batch_stride == 0 ? 1 : extents.batch},
                                 {mask.row_stride * element_bytes, mask.head_stride * element_bytes,
                                  mask.batch_stride * element_bytes},
                                 {128 / element_bytes, tile::kMaskRows, 1, 1},
                                 {1, 1, 1, 1}},
                     0);
}

}  // namespace dspattn::cuda::blocks
