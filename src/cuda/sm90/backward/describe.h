// Where a sequence's rows and query tiles lie, as all kernels of the backward see it.
#pragma once

#include "cuda/blocks/work.h"
#include "cuda/sm90/backward/params.h"
#include "cuda/tile/gradient_walk.h"

namespace dspattn::cuda::sm90::backward {

struct SequenceRows {
  int batch;        // of the tensors
  int q_row, rows;  // first query row in the tensors, and how many
  int k_row, keys;  // the same of keys
  int first_tile;   // in the workspace
};

__device__ __forceinline__ SequenceRows sequence_rows(const BackwardParams& params, int sequence, int tile_q) {
  Work work;
  const int keys = describe_sequence(params.work, sequence, work);
  const int tiles = (params.work.n_q + tile_q - 1) / tile_q;
  const int first =
      params.work.cumulative_q.present() ? tile::first_packed_tile(work.q_row, sequence, tile_q) : sequence * tiles;
  return {work.batch, work.q_row, work.rows, work.k_row, keys, first};
}

// Which keys its rows see.
__device__ __forceinline__ tile::RowBand band_of(const BackwardParams& params, int sequence, const SequenceRows& rows) {
  const WorkParams& work = params.work;
  return {work.left, work.right, work.offset + (work.bottom_right != 0 ? rows.keys - rows.rows : 0),
          tile::visible_keys(work.key_lengths, sequence, rows.keys)};
}

}  // namespace dspattn::cuda::sm90::backward
