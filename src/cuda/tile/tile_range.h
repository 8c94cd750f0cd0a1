// Tiles of a row of keys, or of a sequence's queries.
#pragma once

#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

// [begin, end).
struct TileRange {
  int begin = 0;
  int end = 0;

  DSPATTN_HOST_DEVICE constexpr int count() const { return end > begin ? end - begin : 0; }
};

}  // namespace dspattn::cuda::tile
