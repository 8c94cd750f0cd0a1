// Chooses the shape of a qk_prune launch on Hopper and makes it.
#include "cuda/sm80/device.h"
#include "cuda/sm80/qk_prune/split.h"
#include "cuda/sm90/pipeline/launch.h"
#include "cuda/sm90/pipeline/qk_prune.cuh"

namespace dspattn::cuda::sm90 {
namespace {

template <typename Element>
void launch_of(QkPruneParams& params, std::int64_t matrices, cudaStream_t stream) {
  using Config = QkConfig<Element>;
  const sm80::LaunchLimits limits = sm80::limits_of_current_device();
  const int groups = sm80::split_tiles(params, Config::kTile, Config::kMaxGroups);
  sm80::split_rows(params, matrices, Config::kStageRows, limits.multiprocessors * Config::kMinCtas);
  const int threads = groups * kGroupThreads;
  if (params.k.aligned && params.k.extent == 64) {
    params.k.advance =
        sm80::key_advance(sm80::rows_per_pass(threads, Config::kChunks), params.group_log2, params.interleaved);
  }
  if (params.q.aligned && params.q.extent == 64) {
    params.q.advance = sm80::rows_per_pass(threads, Config::kChunks);
  }
  const bool elements = params.mask.allowed != nullptr || params.mask.bias != nullptr;
  const auto kernel = elements ? qk_prune_kernel<Element, QkMasks::elements> : qk_prune_kernel<Element, QkMasks::band>;
  sm80::allow_shared_memory(kernel, limits);
  kernel<<<sm80::grid_of(matrices * params.row_tiles * params.key_groups), static_cast<unsigned>(threads),
           static_cast<std::size_t>(Config::shared_bytes(groups)), stream>>>(params);
  sm80::require(cudaGetLastError(), "launching qk_prune");
}

}  // namespace

bool serves_qk_prune(DType dtype, const QkPruneParams& params) {
  // Shorter matrices, blocks and fp32 (whose Q must be rounded in shared memory) are faster with mma.sync: measured.
  constexpr std::int64_t kFewestRows = 1024;
  return dtype != DType::f32 && params.q.extent <= 64 && params.walk.columns == nullptr &&
         params.scores.rows >= kFewestRows;
}

void launch_qk_prune(DType dtype, QkPruneParams params, std::int64_t matrices, void* stream) {
  const auto handle = static_cast<cudaStream_t>(stream);
  dtype == DType::bf16 ? launch_of<__nv_bfloat16>(params, matrices, handle)
                       : launch_of<__half>(params, matrices, handle);
}

}  // namespace dspattn::cuda::sm90
