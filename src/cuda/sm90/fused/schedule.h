// Writes the table that says in which order the items of sequences of different lengths are taken (tile/schedule.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tile/schedule.h"

namespace dspattn::cuda::sm90 {

struct ScheduleParams {
  tile::ScheduleHeader* header = nullptr;
  tile::ScheduleEntry* entries = nullptr;
  int capacity = 0;                            // entries there is room for
  const std::int32_t* cumulative_q = nullptr;  // packed batches only
  const std::int32_t* cumulative_k = nullptr;
  const std::int32_t* key_lengths = nullptr;
  int sequences = 0;
  int n_q = 0, n_k = 0;  // of every sequence; of a packed batch: of the longest
  int tile_q = 0;
};

cudaError_t launch_schedule(const ScheduleParams& params, cudaStream_t stream);

}  // namespace dspattn::cuda::sm90
