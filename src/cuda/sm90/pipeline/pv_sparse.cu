// Chooses the shape of a pv_sparse launch on Hopper and makes it.
#include "cuda/sm80/device.h"
#include "cuda/sm90/pipeline/launch.h"
#include "cuda/sm90/pipeline/pv_sparse.cuh"

namespace dspattn::cuda::sm90 {
namespace {

template <typename Element>
void launch_of(PvSparseParams& params, std::int64_t matrices, cudaStream_t stream) {
  using Config = PvConfig<Element>;
  const sm80::LaunchLimits limits = sm80::limits_of_current_device();
  // Two warpgroups share V where block rows do not differ in what they hold and none idles at the end of the rows.
  const bool uniform = params.walk.columns == nullptr && !params.walk.skip_masked;
  const std::int64_t units = (params.weights.rows + Config::kGroupRows - 1) / Config::kGroupRows;
  const int groups = uniform && units % 2 == 0 ? Config::kMaxGroups : 1;
  const int rows = groups * Config::kGroupRows;
  const int threads = groups * kGroupThreads;
  params.row_tiles = static_cast<int>(units / groups);
  params.column_tiles = 1;
  if (params.v.aligned && params.v.extent == Config::kColumns) {
    params.v.advance =
        sm80::value_advance(sm80::rows_per_pass(threads, Config::kValueChunks), params.group_log2, params.interleaved);
  }
  const auto kernel = pv_sparse_kernel<Element>;
  sm80::allow_shared_memory(kernel, limits);
  kernel<<<sm80::grid_of(matrices * params.row_tiles), static_cast<unsigned>(threads),
           static_cast<std::size_t>(Config::shared_bytes(rows)), stream>>>(params);
  sm80::require(cudaGetLastError(), "launching pv_sparse");
}

}  // namespace

bool serves_pv_sparse(const PvSparseParams& params) {
  return params.v.extent <= PvConfig<float>::kColumns && params.walk.block == 128 && params.weights.rows >= 96;
}

void launch_pv_sparse(DType dtype, PvSparseParams params, std::int64_t matrices, void* stream) {
  const auto handle = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case DType::bf16:
      return launch_of<__nv_bfloat16>(params, matrices, handle);
    case DType::f16:
      return launch_of<__half>(params, matrices, handle);
    default:
      return launch_of<float>(params, matrices, handle);
  }
}

}  // namespace dspattn::cuda::sm90
