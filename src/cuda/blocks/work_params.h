// Which work there is, as the host tells it.
#pragma once

#include "cuda/tile/lengths.h"
#include "cuda/tile/schedule.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::blocks {

// The part of a kernel's parameters that says which items there are and which keys their rows see.
struct WorkParams {
  tile::LengthsView cumulative_q, cumulative_k;  // packed batches only
  tile::LengthsView key_lengths;
  int q_rows = 0, k_rows = 0;  // of the tensors: no packed sequence reaches beyond

  tile::ItemOrder order;                     // where there is no schedule
  tile::ScheduleHeader* schedule = nullptr;  // its entries lie behind it
  int pairs = 0;                             // 1: CTAs work in pairs that share their loads of K and V
  int descending = 0;                        // 1: an item's key blocks are loaded from its last down to its first
  tile::Divisor heads;
  tile::Divisor heads_per_kv_head;
  int n_q = 0;  // of every sequence; of a packed batch: of the longest
  int n_k = 0;
  int left = 0, right = 0, bottom_right = 1, offset = 0;  // see tile::RowBand
};

}  // namespace dspattn::cuda::blocks
