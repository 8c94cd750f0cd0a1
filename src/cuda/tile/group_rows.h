// Which query head and which position a row of a CTA's tile is, where query heads that share a key head choose their
// keys together: all of them at one position then stand in neighbouring rows, filled up to a power of two. Elsewhere a
// tile's rows are positions of one head.
#pragma once

#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

struct GroupRows {
  int heads = 1;      // of a position; rows past them, up to the next power of two, are no row
  int rows_log2 = 0;  // rows of a position

  DSPATTN_HOST_DEVICE constexpr int position(int row) const { return row >> rows_log2; }
  DSPATTN_HOST_DEVICE constexpr int head(int row) const { return row & ((1 << rows_log2) - 1); }
  DSPATTN_HOST_DEVICE constexpr bool exists(int row) const { return head(row) < heads; }
  // Of a tile of so many rows.
  DSPATTN_HOST_DEVICE constexpr int positions(int rows) const { return rows >> rows_log2; }
};

constexpr GroupRows group_rows(int heads) {
  GroupRows rows{heads, 0};
  while ((1 << rows.rows_log2) < heads) ++rows.rows_log2;
  return rows;
}

}  // namespace dspattn::cuda::tile
