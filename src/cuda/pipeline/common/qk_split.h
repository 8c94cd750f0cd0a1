// How a qk_prune launch divides the score matrix among CTAs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/pipeline/common/params.h"

namespace dspattn::cuda::pipeline {

constexpr std::int64_t parts(std::int64_t whole, std::int64_t part) { return (whole + part - 1) / part; }

// A row's tiles in equal parts of at most `most`; returns the tiles of a CTA.
inline int split_tiles(QkPruneParams& params, int tile_places, int most) {
  const std::int64_t tiles = parts(params.scores.places, tile_places);
  const std::int64_t share = parts(tiles, parts(tiles, most));
  params.key_groups = static_cast<int>(parts(tiles, share));
  return static_cast<int>(share);
}

// One block row where each has its own blocks. Else as many rows for one copy of K as leave `resident` CTAs, those that
// run at once, enough to do for the last of them to weigh little.
inline void split_rows(QkPruneParams& params, std::int64_t matrices, int stage_rows, std::int64_t resident) {
  params.rows_per_cta = params.walk.block;
  if (params.walk.columns == nullptr) {
    constexpr std::int64_t kTurns = 6;
    constexpr int kMostRows = 2048;
    params.rows_per_cta = std::max(params.walk.block, stage_rows);
    while (params.rows_per_cta < kMostRows && params.rows_per_cta < params.scores.rows &&
           matrices * params.key_groups * parts(params.scores.rows, 2 * params.rows_per_cta) >= kTurns * resident) {
      params.rows_per_cta *= 2;
    }
  }
  params.row_tiles = static_cast<int>(parts(params.scores.rows, params.rows_per_cta));
}

}  // namespace dspattn::cuda::pipeline
