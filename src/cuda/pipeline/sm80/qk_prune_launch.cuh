// Chooses the shape of a qk_prune launch and makes it.
#pragma once

#include "cuda/device/device.h"
#include "cuda/pipeline/common/qk_split.h"
#include "cuda/pipeline/sm80/launch.h"
#include "cuda/pipeline/sm80/qk_prune.cuh"

namespace dspattn::cuda::pipeline {

template <typename Element, int kHeadDim>
void launch_qk_prune_at(QkPruneParams& params, std::int64_t matrices, void* stream) {
  using Config = QkConfig<Element, kHeadDim>;
  const DeviceFacts& device = current_device_facts();
  int most = Config::kMaxWarps;
  while (most > 1 && Config::shared_bytes(most) > device.shared_bytes) --most;
  const int warps = split_tiles(params, Config::kTile, most);
  const int shared_bytes = Config::shared_bytes(warps);
  if (shared_bytes > device.shared_bytes) {
    throw Error("q.shape[3]: head dimension needs " + std::to_string(shared_bytes) +
                " bytes of shared memory, the device has " + std::to_string(device.shared_bytes));
  }
  split_rows(params, matrices, Config::kStageRows, device.multiprocessors * Config::kMinCtas);
  if (params.k.aligned && params.k.extent == kHeadDim) {
    params.k.advance = key_advance(rows_per_pass(32 * warps, Config::kChunks), params.group_log2, params.interleaved);
  }
  if (params.q.aligned && params.q.extent == kHeadDim) {
    params.q.advance = rows_per_pass(32 * warps, Config::kChunks);
  }
  const bool elements = params.mask.allowed != nullptr || params.mask.bias != nullptr;
  const auto kernel = elements ? qk_prune_kernel<Element, kHeadDim, QkMasks::elements>
                               : qk_prune_kernel<Element, kHeadDim, QkMasks::band>;
  allow_shared_memory(kernel, device.shared_bytes);
  launch("qk_prune", kernel,
         {.ctas = grid_of(matrices * params.row_tiles * params.key_groups),
          .threads = 32 * warps,
          .shared_bytes = shared_bytes},
         static_cast<cudaStream_t>(stream), params);
}

template <typename Element>
void launch_qk_prune_of(QkPruneParams params, std::int64_t matrices, void* stream) {
  if (params.q.extent <= 64) return launch_qk_prune_at<Element, 64>(params, matrices, stream);
  if (params.q.extent <= 128) return launch_qk_prune_at<Element, 128>(params, matrices, stream);
  launch_qk_prune_at<Element, 256>(params, matrices, stream);
}

}  // namespace dspattn::cuda::pipeline
