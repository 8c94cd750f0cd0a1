// The three-kernel pipeline's kernels that use Hopper's own instructions. They need compute capability 9.0; what they
// do not serve, the kernels of cuda/sm80 do.
#pragma once

#include <cstdint>

#include "cuda/sm80/params.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::sm90 {

// 16-bit types, head dims up to 64, long matrices, no block mask.
bool serves_qk_prune(DType dtype, const sm80::QkPruneParams& params);
void launch_qk_prune(DType dtype, sm80::QkPruneParams params, std::int64_t matrices, void* stream);

// d_v up to 64, long rows, no blocks of 64: a warpgroup has 128 rows.
bool serves_pv_sparse(DType dtype, const sm80::PvSparseParams& params);
void launch_pv_sparse(DType dtype, sm80::PvSparseParams params, std::int64_t matrices, void* stream);

}  // namespace dspattn::cuda::sm90
