// Chooses the shape of a pv_sparse launch on Hopper and makes it.
#include "cuda/sm80/device.h"
#include "cuda/sm90/pipeline/launch.h"
#include "cuda/sm90/pipeline/pv_sparse.cuh"

namespace dspattn::cuda::sm90 {
namespace {

// Two warpgroups share V where block rows do not differ in what they hold and none idles at the end of the rows.
int groups_of(const PvSparseParams& params) {
  constexpr int kPairRows = 2 * PvConfig<float>::kGroupRows;
  const bool uniform = params.walk.columns == nullptr && !params.walk.skip_masked;
  return uniform && (params.weights.rows + kPairRows / 2 - 1) / (kPairRows / 2) % 2 == 0 ? 2 : 1;
}

template <typename Element, int kGroups>
void launch_groups(PvSparseParams& params, std::int64_t matrices, cudaStream_t stream) {
  using Config = PvConfig<Element>;
  constexpr int kRows = kGroups * Config::kGroupRows, kThreads = kGroups * kGroupThreads;
  const sm80::LaunchLimits limits = sm80::limits_of_current_device();
  params.row_tiles = static_cast<int>((params.weights.rows + kRows - 1) / kRows);
  params.column_tiles = 1;
  if (params.v.aligned && params.v.extent == Config::kColumns) {
    params.v.advance =
        sm80::value_advance(sm80::rows_per_pass(kThreads, Config::kValueChunks), params.group_log2, params.interleaved);
  }
  const auto kernel = pv_sparse_kernel<Element, kGroups>;
  sm80::allow_shared_memory(kernel, limits);
  kernel<<<sm80::grid_of(matrices * params.row_tiles), kThreads, static_cast<std::size_t>(Config::shared_bytes(kRows)),
           stream>>>(params);
  sm80::require(cudaGetLastError(), "launching pv_sparse");
}

template <typename Element>
void launch_of(PvSparseParams& params, std::int64_t matrices, cudaStream_t stream) {
  groups_of(params) == 2 ? launch_groups<Element, 2>(params, matrices, stream)
                         : launch_groups<Element, 1>(params, matrices, stream);
}

}  // namespace

bool serves_pv_sparse(DType dtype, const PvSparseParams& params) {
  // Measured: short rows are over before the tensor core's speed counts. A warpgroup of fp32 alone leaves no shared
  // memory for a second one, and idles at every barrier.
  const std::int64_t fewest_places = dtype == DType::f32 ? 512 : 1024;
  return params.v.extent <= PvConfig<float>::kColumns && params.walk.block == 128 &&
         params.weights.places >= fewest_places && params.weights.rows >= 96 &&
         (dtype != DType::f32 || groups_of(params) == 2);
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
