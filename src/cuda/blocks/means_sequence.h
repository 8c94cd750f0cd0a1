// What the kernels that write means of V (means.h) have in common: where a sequence lies.
#pragma once

#include "cuda/blocks/means_params.h"

namespace dspattn::cuda::blocks {

// Where a sequence lies and which keys it has.
struct Sequence {
  tile::MeanTable::Sequence place;
  int batch = 0;  // of V
  int rows = 0, keys = 0;
  int key_length = 0;  // of which so many are seen
};

__device__ __forceinline__ Sequence sequence_of(const MeansParams& params, int index) {
  const WorkParams& work = params.work;
  Sequence sequence{{index, 0, 0}, index, work.n_q, work.n_k, 0};
  if (work.cumulative_q.present()) {
    const tile::RowSpan queries = tile::packed_span(work.cumulative_q, index, work.q_rows, work.n_q);
    const tile::RowSpan keys = tile::packed_span(work.cumulative_k, index, work.k_rows, work.n_k);
    sequence = {{index, keys.begin, queries.begin}, 0, queries.count, keys.count, 0};
  }
  sequence.key_length = tile::visible_keys(work.key_lengths, index, sequence.keys);
  return sequence;
}

}  // namespace dspattn::cuda::blocks
