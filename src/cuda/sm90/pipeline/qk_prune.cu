// Chooses the shape of a qk_prune launch on Hopper and makes it.
#include "cuda/sm80/device.h"
#include "cuda/sm80/qk_prune/split.h"
#include "cuda/sm90/fused/tensor_maps.h"
#include "cuda/sm90/pipeline/launch.h"
#include "cuda/sm90/pipeline/qk_blocks.cuh"
#include "cuda/sm90/pipeline/qk_prune.cuh"

namespace dspattn::cuda::sm90 {
namespace {

template <typename Element, QkMasks kMasks, int kGroupLog2>
void launch_masks(DType dtype, QkPruneParams& params, std::int64_t matrices, cudaStream_t stream) {
  using Config = QkConfig<Element, kMasks>;
  const sm80::LaunchLimits limits = sm80::limits_of_current_device();
  const int groups = sm80::split_tiles(params, Config::kPlaces, Config::kGroups);
  sm80::split_rows(params, matrices, sm80::kWalkBlock, limits.multiprocessors * Config::kMinCtas);
  const int threads = groups * kGroupThreads;
  if (params.k.aligned && params.k.extent == 64) {
    params.k.advance =
        sm80::key_advance(sm80::rows_per_pass(threads, Config::kChunks), params.group_log2, params.interleaved);
  }
  QkLaunch launch{params, {}};
  const sm80::RowsParams& q = params.q;
  if (!make_rows_map(launch.q, {q.data, q.batch_stride, q.head_stride, q.row_stride},
                     {matrices / params.heads, params.heads, params.walk.n_q, q.extent}, dtype, Config::kStageRows,
                     1)) {
    throw Error("q: expected a tensor that the copy engine can address");
  }
  const auto kernel = qk_prune_kernel<Element, kMasks, kGroupLog2>;
  sm80::allow_shared_memory(kernel, limits);
  sm80::launch("qk_prune", kernel, sm80::grid_of(matrices * params.row_tiles * params.key_groups), threads,
               Config::shared_bytes(groups), stream, launch);
}

template <typename Element, int kGroupLog2>
void launch_blocks(QkPruneParams& params, std::int64_t matrices, cudaStream_t stream) {
  using Config = QkBlocksConfig<Element>;
  const sm80::LaunchLimits limits = sm80::limits_of_current_device();
  params.key_groups = static_cast<int>(sm80::parts(params.scores.places, Config::kPlaces * Config::kShare));
  params.rows_per_cta = params.walk.block;
  params.row_tiles = static_cast<int>(sm80::parts(params.scores.rows, params.rows_per_cta));
  if (params.k.aligned && params.k.extent == 64) {
    params.k.advance =
        sm80::key_advance(sm80::rows_per_pass(kGroupThreads, Config::kChunks), params.group_log2, params.interleaved);
  }
  const auto kernel = qk_blocks_kernel<Element, kGroupLog2>;
  sm80::allow_shared_memory(kernel, limits);
  sm80::launch("qk_prune", kernel, sm80::grid_of(matrices * params.row_tiles * params.key_groups), kGroupThreads,
               Config::shared_bytes(params.walk.block), stream, params);
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

}  // namespace dspattn::cuda::sm90
