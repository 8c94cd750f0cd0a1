// Descriptions of Q, K, V and the output for the copy engine (TMA).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/sm90/fused/params.h"
#include "cuda/tile/key_map.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::sm90 {

// Extents of a [batch, heads, rows, columns] tensor.
struct Extents {
  std::int64_t batch, heads, rows, columns;
};

// Each returns false when the copy engine cannot address the tensor (alignment, strides); the map is then unusable.
//
// (column, row, head, batch), boxes of 128 bytes of columns x `rows` rows, every row_step-th. Rows past the tensor's
// end are filled with zeros. fp32 is rounded to tf32.
bool make_rows_map(CUtensorMap& map, const Rows& tensor, const Extents& extents, DType type, int rows, int row_step);

// Q: tile_q rows as they lie.
bool make_q_map(CUtensorMap& map, const Rows& tensor, const Extents& extents, DType type, int tile_q);

// The output: `rows` rows at once, from shared memory.
bool make_out_map(CUtensorMap& map, const Rows& tensor, const Extents& extents, DType type, int rows);

// K and V permute the keys of a tile into groups (tile/key_map.h) on the way. Both are (column, element, row, head,
// batch), where a step of `element` moves by some rows and a step of `row` by one: the two overlap, so a tile may start
// at any row, as packed sequences need. A box may only be read where all its rows exist: the bound on `row` does not
// see the rows that `element` adds. The caller loads partial blocks otherwise.
bool make_k_map(CUtensorMap& map, const Rows& tensor, const Extents& extents, DType type, const tile::KeyMap& keys,
                int tile_k);
bool make_v_map(CUtensorMap& map, const Rows& tensor, const Extents& extents, DType type, const tile::KeyMap& keys,
                int tile_k);

// A mask tensor of the whole problem's extents [batch, heads, n_q, n_k]: (key, row, head, batch), boxes of 128 bytes of
// keys x 64 rows (tile/mask_map.h).
bool make_mask_map(CUtensorMap& map, const MaskTensor& mask, const Extents& extents, int element_bytes);

}  // namespace dspattn::cuda::sm90
