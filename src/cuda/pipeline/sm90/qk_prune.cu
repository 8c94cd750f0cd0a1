// Chooses the shape of a qk_prune launch on Hopper and makes it.
#include "cuda/blocks/tensor_maps.h"
#include "cuda/device/device.h"
#include "cuda/pipeline/common/qk_split.h"
#include "cuda/pipeline/sm90/launch.h"
#include "cuda/pipeline/sm90/qk_blocks.cuh"
#include "cuda/pipeline/sm90/qk_prune.cuh"

namespace dspattn::cuda::pipeline::sm90 {
namespace {

template <typename Element, QkMasks kMasks, int kGroupLog2>
void launch_masks(DType dtype, QkPruneParams& params, std::int64_t matrices, cudaStream_t stream) {
  using Config = QkConfig<Element, kMasks>;
  const DeviceFacts& device = current_device_facts();
  const int groups = split_tiles(params, Config::kPlaces, Config::kGroups);
  split_rows(params, matrices, kWalkBlock, device.multiprocessors * Config::kMinCtas);
  const int threads = groups * kGroupThreads;
  if (params.k.aligned && params.k.extent == 64) {
    params.k.advance = key_advance(rows_per_pass(threads, Config::kChunks), params.group_log2, params.interleaved);
  }
  QkLaunch launch{params, {}};
  const RowsParams& q = params.q;
  if (!blocks::make_map(launch.q,
                        blocks::rows_shape({q.data, q.batch_stride, q.head_stride, q.row_stride},
                                           {matrices / params.heads, params.heads, params.walk.n_q, q.extent}, dtype,
                                           Config::kStageRows, 1),
                        dtype)) {
    throw Error("q: expected a tensor that TMA can address");
  }
  const auto kernel = qk_prune_kernel<Element, kMasks, kGroupLog2>;
  allow_shared_memory(kernel, device.shared_bytes);
  cuda::launch("qk_prune", kernel,
               {.ctas = grid_of(matrices * params.row_tiles * params.key_groups),
                .threads = threads,
                .shared_bytes = Config::shared_bytes(groups)},
               stream, launch);
}

template <typename Element, int kGroupLog2>
void launch_blocks(QkPruneParams& params, std::int64_t matrices, cudaStream_t stream) {
  using Config = QkBlocksConfig<Element>;
  const DeviceFacts& device = current_device_facts();
  params.key_groups = static_cast<int>(parts(params.scores.places, Config::kPlaces * Config::kShare));
  params.rows_per_cta = params.walk.block;
  params.row_tiles = static_cast<int>(parts(params.scores.rows, params.rows_per_cta));
  if (params.k.aligned && params.k.extent == 64) {
    params.k.advance =
        key_advance(rows_per_pass(kGroupThreads, Config::kChunks), params.group_log2, params.interleaved);
  }
  const auto kernel = qk_blocks_kernel<Element, kGroupLog2>;
  allow_shared_memory(kernel, device.shared_bytes);
  cuda::launch("qk_prune", kernel,
               {.ctas = grid_of(matrices * params.row_tiles * params.key_groups),
                .threads = kGroupThreads,
                .shared_bytes = Config::shared_bytes(params.walk.block)},
               stream, params);
}

template <typename Element, int kGroupLog2>
void launch_of(DType dtype, QkPruneParams& params, std::int64_t matrices, cudaStream_t stream) {
  if (params.mask.allowed != nullptr || params.mask.bias != nullptr) {
    launch_masks<Element, QkMasks::elements, kGroupLog2>(dtype, params, matrices, stream);
  } else if (params.walk.columns != nullptr && !params.banded) {
    launch_blocks<Element, kGroupLog2>(params, matrices, stream);
  } else if (params.banded) {
    launch_masks<Element, QkMasks::band, kGroupLog2>(dtype, params, matrices, stream);
  } else {
    launch_masks<Element, QkMasks::none, kGroupLog2>(dtype, params, matrices, stream);
  }
}

}  // namespace

bool serves_qk_prune(const QkPruneParams& params, std::int64_t matrices) {
  return params.q.extent <= 64 && addressable(params.q, matrices / params.heads, params.heads, params.walk.n_q);
}

void launch_qk_prune(DType dtype, QkPruneParams params, std::int64_t matrices, void* stream) {
  const auto handle = static_cast<cudaStream_t>(stream);
  const bool pairs = params.group_log2 == 1;
  switch (dtype) {
    case DType::bf16:
      return pairs ? launch_of<__nv_bfloat16, 1>(dtype, params, matrices, handle)
                   : launch_of<__nv_bfloat16, 2>(dtype, params, matrices, handle);
    case DType::f16:
      return pairs ? launch_of<__half, 1>(dtype, params, matrices, handle)
                   : launch_of<__half, 2>(dtype, params, matrices, handle);
    default:
      return launch_of<float, 1>(dtype, params, matrices, handle);
  }
}

}  // namespace dspattn::cuda::pipeline::sm90
