// What the pipeline's Hopper kernels share.
#pragma once

#include "cuda/pipeline/common/tile_maps.h"

namespace dspattn::cuda::pipeline::sm90 {

inline constexpr int kGroupThreads = 128;  // of a warpgroup
inline constexpr int kPanelBytes = 128;    // of a row: the width of the swizzle that wgmma reads

// A chunk in a tile of `rows` rows: panel by panel, each row's chunks swizzled.
DSPATTN_HOST_DEVICE constexpr int panel_offset(int rows, int row, int chunk) {
  return chunk / 8 * rows * kPanelBytes + swizzled_wide(row, chunk % 8, kPanelBytes);
}

// A product has 64 rows, 16 of each warp: half a unit of the metadata. The word, counted from the start of a word
// column, that a lane gives wgmma.sp for its warp's rows from row16 on; lanes t and t + 2 give the same, the first two
// count.
DSPATTN_HOST_DEVICE constexpr int lane_word(int row16, int lane) {
  constexpr int kUnit = kRowUnit;
  return static_cast<int>(metadata_word(0, row16 / kUnit * kUnit, row16 / 16 % 2, lane / 4, lane % 2));
}

}  // namespace dspattn::cuda::pipeline::sm90
