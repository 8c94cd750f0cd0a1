// Chooses the shape of a qk_prune launch and makes it.
#pragma once

#include <algorithm>

#include "cuda/sm80/device.h"
#include "cuda/sm80/launch.h"
#include "cuda/sm80/qk_prune/kernel.cuh"

namespace dspattn::cuda::sm80 {

template <typename Element, int kHeadDim>
void launch_qk_prune_at(QkPruneParams& params, std::int64_t matrices, void* stream) {
  using Config = QkConfig<Element, kHeadDim>;
  const LaunchLimits limits = limits_of_current_device();
  // Whole block rows per CTA at most, no more warps than rows, and a ring that fits in shared memory.
  int warps = std::min(params.walk.block, kQkMaxThreads) / kRowUnit;
  while (warps > 1 && (Config::shared_bytes(warps * kRowUnit) > limits.shared_bytes ||
                       (warps / 2) * kRowUnit >= params.scores.rows)) {
    warps /= 2;
  }
  const int rows = warps * kRowUnit;
  const int shared_bytes = Config::shared_bytes(rows);
  if (shared_bytes > limits.shared_bytes) {
    throw Error("q.shape[3]: head dimension needs " + std::to_string(shared_bytes) +
                " bytes of shared memory, the device has " + std::to_string(limits.shared_bytes));
  }
  params.row_tiles = static_cast<int>((params.scores.rows + rows - 1) / rows);
  // Enough CTAs to keep the last wave short, but at least four blocks of keys for each copy of Q.
  constexpr std::int64_t kWaves = 8;
  const std::int64_t row_ctas = matrices * params.row_tiles;
  const std::int64_t wanted = kWaves * Config::kMinCtas * limits.multiprocessors / std::max<std::int64_t>(row_ctas, 1);
  const std::int64_t slots = params.walk.columns != nullptr ? params.walk.width : params.walk.key_blocks;
  params.key_splits = static_cast<int>(std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(slots / 4, 1)));
  if (params.k.aligned && params.k.extent == kHeadDim) {
    params.k.advance = key_advance(rows_per_pass(rows, Config::kChunks), params.group_log2, params.interleaved);
  }
  const auto kernel = qk_prune_kernel<Element, kHeadDim>;
  allow_shared_memory(kernel, limits);
  kernel<<<grid_of(row_ctas * params.key_splits), static_cast<unsigned>(rows), static_cast<std::size_t>(shared_bytes),
           static_cast<cudaStream_t>(stream)>>>(params);
  require(cudaGetLastError(), "launching qk_prune");
}

template <typename Element>
void launch_qk_prune_of(QkPruneParams params, std::int64_t matrices, void* stream) {
  if (params.q.extent <= 64) return launch_qk_prune_at<Element, 64>(params, matrices, stream);
  if (params.q.extent <= 128) return launch_qk_prune_at<Element, 128>(params, matrices, stream);
  launch_qk_prune_at<Element, 256>(params, matrices, stream);
}

}  // namespace dspattn::cuda::sm80
