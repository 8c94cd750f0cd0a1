// Which CTA adds up what of the gradient of a bias, dS summed over the dimensions that the bias is broadcast over.
//
// Where the bias has a number for every (query, key), a CTA owns a tile of them, walks all sequences and heads that it
// is the bias of, and writes it. Where queries or keys share a number, a CTA owns one sequence and head, walks the row
// tiles and key tiles that its numbers are the sum of, and writes a part of a size linear in the length; another kernel
// adds those of all sequences and heads (prepare.cu). All in a fixed order.
#pragma once

#include "cuda/general/backward/config.h"
#include "cuda/general/backward/params.h"

namespace dspattn::cuda::general::backward {

// What a CTA adds up: boxes of sequences, heads, row tiles and key tiles.
struct BiasPart {
  int sequence, sequences, head, heads, row_tile, row_tiles;
  tile::TileRange key_tiles;
  int tiles_of_rows;  // all together
};

struct BiasPlace {
  int sequence, head, row_tile;
};

// Of CTA `index`. A dimension that the CTA owns one of has the index's remainder.
DSPATTN_HOST_DEVICE inline BiasPart bias_part(const BackwardParams& params, int index) {
  const BiasGradient& g = params.bias_gradient;
  const bool parts = g.sums_rows != 0 || g.sums_keys != 0;
  const auto take = [&](bool owns, int count, int& first, int& number) {
    first = owns ? index % count : 0;
    number = owns ? 1 : count;
    if (owns) index /= count;
  };
  BiasPart part;
  int key_tile, key_tiles;
  take(g.sums_keys == 0, params.tile_units * kTileUnit, key_tile, key_tiles);
  part.key_tiles = {key_tile, key_tile + key_tiles};
  take(g.sums_rows == 0, params.row_tiles, part.row_tile, part.row_tiles);
  take(parts || g.extent[1] > 1, params.work.heads.value, part.head, part.heads);
  take(parts || g.extent[0] > 1, params.sequences, part.sequence, part.sequences);
  part.tiles_of_rows = part.sequences * part.heads * part.row_tiles;
  return part;
}

DSPATTN_HOST_DEVICE inline BiasPlace place_of_rows(const BiasPart& part, int number) {
  const int row_tile = number % part.row_tiles;
  const int rest = number / part.row_tiles;
  return {part.sequence + rest / part.heads, part.head + rest % part.heads, part.row_tile + row_tile};
}

// CTAs that it takes.
inline std::int64_t bias_ctas(const BackwardParams& params) {
  const BiasGradient& g = params.bias_gradient;
  const bool parts = g.sums_rows != 0 || g.sums_keys != 0;
  return (g.sums_keys != 0 ? 1 : static_cast<std::int64_t>(params.tile_units) * kTileUnit) *
         (g.sums_rows != 0 ? 1 : params.row_tiles) * (parts || g.extent[1] > 1 ? params.work.heads.value : 1) *
         (parts || g.extent[0] > 1 ? params.sequences : 1);
}

}  // namespace dspattn::cuda::general::backward
