// Chooses the shape of a pv_sparse launch on Hopper and makes it.
#include <algorithm>

#include "cuda/blocks/tensor_maps.h"
#include "cuda/device/device.h"
#include "cuda/pipeline/sm90/launch.h"
#include "cuda/pipeline/sm90/pv_sparse.cuh"

namespace dspattn::cuda::pipeline::sm90 {
namespace {

template <typename Config>
void launch_shape(DType dtype, PvSparseParams& params, std::int64_t matrices, cudaStream_t stream) {
  const DeviceFacts& device = current_device_facts();
  params.row_tiles = static_cast<int>((params.weights.rows + Config::kRows - 1) / Config::kRows);
  params.column_tiles = 1;
  PvLaunch launch;
  launch.jobs = static_cast<int>(grid_of(matrices * params.row_tiles));
  const MatrixParams& weights = params.weights;
  const std::int64_t row = weights.places / 2;
  const RowsParams& v = params.v;
  const tile::KeyMap keys =
      tile::key_map({params.group_log2, 1 << params.group_log2},
                    params.interleaved ? Grouping::interleaved : Grouping::consecutive, Config::kBoxPlaces);
  const std::int64_t kv_heads = params.heads / params.heads_per_kv;
  if (!blocks::make_map(launch.nonzeros,
                        blocks::rows_shape({weights.nonzeros, 0, weights.rows * row, row},
                                           {1, matrices, weights.rows, row}, dtype, Config::kRows, 1),
                        dtype) ||
      !blocks::make_map(launch.values,
                        blocks::v_shape({v.data, v.batch_stride, v.head_stride, v.row_stride},
                                        {matrices / params.heads, kv_heads, params.walk.n_k, v.extent}, dtype, keys,
                                        Config::kBoxPlaces),
                        dtype)) {
    throw Error("v: expected a tensor that TMA can address");
  }
  launch.common = params;
  const auto kernel = pv_sparse_kernel<Config>;
  allow_shared_memory(kernel, device.shared_bytes);
  const int ctas = std::min(launch.jobs, device.multiprocessors * Config::kCtas);
  cuda::launch("pv_sparse", kernel,
               {.ctas = static_cast<unsigned>(ctas), .threads = Config::kThreads, .shared_bytes = Config::kSharedBytes},
               stream, launch);
}

// As many rows as share V without crossing a block row where block rows differ in what they hold, and without idling
// at the end of the rows.
template <typename Element>
void launch_of(DType dtype, PvSparseParams& params, std::int64_t matrices, cudaStream_t stream) {
  const bool uniform = params.walk.columns == nullptr && !params.walk.skip_masked;
  const auto covered = [&](std::int64_t rows) { return (params.weights.rows + rows - 1) / rows * rows; };
  if (!uniform && params.walk.block == 64) {
    launch_shape<PvConfig<Element, 1, 1>>(dtype, params, matrices, stream);
  } else if (!uniform || covered(128) < std::min(covered(192), covered(256))) {
    launch_shape<PvConfig<Element, 1, 2>>(dtype, params, matrices, stream);
  } else if (covered(192) < covered(256)) {
    launch_shape<PvConfig<Element, 1, 3>>(dtype, params, matrices, stream);
  } else {
    launch_shape<PvConfig<Element, 2, 2>>(dtype, params, matrices, stream);
  }
}

}  // namespace

bool serves_pv_sparse(const PvSparseParams& params, std::int64_t matrices) {
  // The map of interleaved groups cannot see where a block of 128 keys ends early.
  return params.v.extent <= 64 && (!params.interleaved || params.walk.n_k % kInterleaveBlock == 0) &&
         addressable(params.v, matrices / params.heads, params.heads / params.heads_per_kv, params.walk.n_k);
}

void launch_pv_sparse(DType dtype, PvSparseParams params, std::int64_t matrices, void* stream) {
  const auto handle = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case DType::bf16:
      return launch_of<__nv_bfloat16>(dtype, params, matrices, handle);
    case DType::f16:
      return launch_of<__half>(dtype, params, matrices, handle);
    default:
      return launch_of<float>(dtype, params, matrices, handle);
  }
}

}  // namespace dspattn::cuda::pipeline::sm90
