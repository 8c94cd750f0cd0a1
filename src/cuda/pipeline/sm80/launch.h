// Launches of the three kernels: one function each, for every element type and head dim. Parameters that depend on the
// launch (tiles, splits) are filled in here; the rest is the caller's. All throw dspattn::Error.
#pragma once

#include <cstdint>

#include "cuda/pipeline/common/params.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::pipeline {

// matrices: batch * heads. `stream` is a cudaStream_t of the current device.
void launch_qk_prune(DType dtype, QkPruneParams params, std::int64_t matrices, void* stream);
void launch_softmax(DType dtype, const SoftmaxParams& params, void* stream);
void launch_pv_sparse(DType dtype, PvSparseParams params, std::int64_t matrices, void* stream);

// One file per element type, so that they compile side by side.
void launch_qk_prune_bf16(QkPruneParams params, std::int64_t matrices, void* stream);
void launch_qk_prune_f16(QkPruneParams params, std::int64_t matrices, void* stream);
void launch_qk_prune_f32(QkPruneParams params, std::int64_t matrices, void* stream);
void launch_pv_sparse_bf16(PvSparseParams params, std::int64_t matrices, void* stream);
void launch_pv_sparse_f16(PvSparseParams params, std::int64_t matrices, void* stream);
void launch_pv_sparse_f32(PvSparseParams params, std::int64_t matrices, void* stream);

}  // namespace dspattn::cuda::pipeline
