// Which query head and which position a row of a CTA's tile is, where query heads that share a key head choose their
// keys together: all of them at one position then stand in neighbouring rows, filled up to a power of two. More heads
// than a tile takes are cut into parts, a tile each. Elsewhere a tile's rows are positions of one head.
#pragma once

#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

inline constexpr int kMostGroupRows = 16;  // of a position: rows of a warp's product

struct GroupRows {
  int heads = 1;      // of a position in the tile; rows past them, up to the next power of two, are no row
  int rows_log2 = 0;  // rows of a position
  int all = 1;        // heads that choose together

  DSPATTN_HOST_DEVICE constexpr int position(int row) const { return row >> rows_log2; }
  DSPATTN_HOST_DEVICE constexpr int head(int row) const { return row & ((1 << rows_log2) - 1); }
  DSPATTN_HOST_DEVICE constexpr bool exists(int row) const { return head(row) < heads; }
  // Of a tile of so many rows.
  DSPATTN_HOST_DEVICE constexpr int positions(int rows) const { return rows >> rows_log2; }

  DSPATTN_HOST_DEVICE constexpr int parts() const { return (all + kMostGroupRows - 1) / kMostGroupRows; }
  // The rows of another part.
  DSPATTN_HOST_DEVICE constexpr GroupRows part(int index) const {
    const int left = all - index * kMostGroupRows;
    return {left < kMostGroupRows ? left : kMostGroupRows, rows_log2, all};
  }
};

// Of the first part.
constexpr GroupRows group_rows(int heads) {
  GroupRows rows{heads < kMostGroupRows ? heads : kMostGroupRows, 0, heads};
  while ((1 << rows.rows_log2) < rows.heads) ++rows.rows_log2;
  return rows;
}

}  // namespace dspattn::cuda::tile
