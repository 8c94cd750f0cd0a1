// Where keys are the rows of scores (column_of_key_row() of key_tiles.h): which lanes share a group of more than four.
#pragma once

#include "cuda/tile/key_tiles.h"

namespace dspattn::cuda::tile {

// Lanes of equal queries hold four places each: in the order of places, lane g (of eight: lane / 4) is number t, and
// back. Lanes of numbers t and t ^ x differ as those of 0 and x do.
DSPATTN_HOST_DEVICE constexpr int number_of_key_row_lane(int g) { return 2 * (g & 3) + (g >> 2); }
DSPATTN_HOST_DEVICE constexpr int key_row_lane_of_number(int t) { return (t >> 1) + 4 * (t & 1); }

}  // namespace dspattn::cuda::tile
