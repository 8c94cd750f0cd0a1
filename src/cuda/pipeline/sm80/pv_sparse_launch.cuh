// Chooses the shape of a pv_sparse launch and makes it.
#pragma once

#include <algorithm>

#include "cuda/device/device.h"
#include "cuda/pipeline/sm80/launch.h"
#include "cuda/pipeline/sm80/pv_sparse.cuh"

namespace dspattn::cuda::pipeline {

// Warps of a CTA, a power of two: as many as share V tiles without idling at the end of the rows. Where block rows
// differ in what they hold (a block mask, blocks left out), a CTA must stay within one.
template <typename Element, int kHeadDim>
int pv_warps(const PvSparseParams& params, int shared_limit) {
  using Config = PvConfig<Element, kHeadDim>;
  const bool uniform = params.walk.columns == nullptr && !params.walk.skip_masked;
  const int most = uniform ? Config::kMaxThreads / 32 : params.walk.block / Config::kWarpRows;
  int best = 1;
  std::int64_t best_rows = 0;
  for (int warps = 1; warps <= std::min(most, Config::kMaxThreads / 32); warps *= 2) {
    const int rows = warps * Config::kWarpRows;
    if (Config::shared_bytes(rows) > shared_limit || (!uniform && params.walk.block % rows != 0)) continue;
    const std::int64_t covered = (params.weights.rows + rows - 1) / rows * rows;
    if (best_rows == 0 || covered <= best_rows) {
      best = warps;
      best_rows = covered;
    }
  }
  return best;
}

template <typename Element, int kHeadDim>
void launch_pv_sparse_at(PvSparseParams& params, std::int64_t matrices, void* stream) {
  using Config = PvConfig<Element, kHeadDim>;
  const DeviceFacts& device = current_device_facts();
  const int warps = pv_warps<Element, kHeadDim>(params, device.shared_bytes);
  const int rows = warps * Config::kWarpRows;
  const int shared_bytes = Config::shared_bytes(rows);
  params.row_tiles = static_cast<int>((params.weights.rows + rows - 1) / rows);
  params.column_tiles = (params.v.extent + kHeadDim - 1) / kHeadDim;
  if (params.v.aligned && params.v.extent % kHeadDim == 0) {
    params.v.advance =
        value_advance(rows_per_pass(32 * warps, Config::kValueChunks), params.group_log2, params.interleaved);
  }
  const auto kernel = pv_sparse_kernel<Element, kHeadDim>;
  allow_shared_memory(kernel, device.shared_bytes);
  launch("pv_sparse", kernel,
         {.ctas = grid_of(matrices * params.row_tiles * params.column_tiles),
          .threads = 32 * warps,
          .shared_bytes = shared_bytes},
         static_cast<cudaStream_t>(stream), params);
}

template <typename Element>
void launch_pv_sparse_of(PvSparseParams params, std::int64_t matrices, void* stream) {
  if (params.v.extent <= 64) return launch_pv_sparse_at<Element, 64>(params, matrices, stream);
  launch_pv_sparse_at<Element, 128>(params, matrices, stream);
}

}  // namespace dspattn::cuda::pipeline
