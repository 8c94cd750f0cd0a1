// What the pipeline's Hopper kernels share.
#pragma once

#include "cuda/sm80/tile_maps.h"

namespace dspattn::cuda::sm90 {

inline constexpr int kGroupThreads = 128;  // of a warpgroup
inline constexpr int kPanelBytes = 128;    // of a row: the width of the swizzle that wgmma reads

// A chunk in a tile of `rows` rows: panel by panel, each row's chunks swizzled.
DSPATTN_HOST_DEVICE constexpr int panel_offset(int rows, int row, int chunk) {
  return chunk / 8 * rows * kPanelBytes + sm80::swizzled_wide(row, chunk % 8, kPanelBytes);
}

// Row 32w + 16h + i of a stage of 128 is row 16w + i of product h, that is row 64h + 16w + i of the stage's memory: the
// two products give a warp 32 rows in a row.
DSPATTN_HOST_DEVICE constexpr int product_row(int row) { return row / 16 % 2 * 64 + row / 32 * 16 + row % 16; }

}  // namespace dspattn::cuda::sm90
