// What runs before a kernel whose sequences only the device knows (schedule.h), as the host tells it.
#pragma once

#include "cuda/blocks/views.h"
#include "cuda/tile/lengths.h"
#include "cuda/tile/schedule.h"

namespace dspattn::cuda::blocks {

struct PrepareParams {
  tile::LengthsView cumulative_q, cumulative_k;  // packed batches only
  tile::LengthsView key_lengths;
  int sequences = 0;
  int n_q = 0, n_k = 0;        // of every sequence; of a packed batch: of the longest
  int q_rows = 0, k_rows = 0;  // of the tensors

  // The table of tile/schedule.h; null where items are taken in a fixed order.
  tile::ScheduleHeader* header = nullptr;
  tile::ScheduleEntry* entries = nullptr;
  int capacity = 0;  // entries there is room for
  int tile_q = 0;

  // Packed batches: rows of these before the first sequence and past the last become 0 and -inf.
  OutView out;
  LseView lse;
  int heads = 0;
  int out_bytes = 0;  // of an element
};

}  // namespace dspattn::cuda::blocks
