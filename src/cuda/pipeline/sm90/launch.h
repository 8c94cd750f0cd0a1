// The three-kernel pipeline's kernels that use Hopper's own instructions. They need compute capability 9.0; what they
// do not serve, the kernels of cuda/sm80 do.
#pragma once

#include <cstdint>

#include "cuda/pipeline/common/params.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::pipeline::sm90 {

// Whether TMA can address [batch, heads, n, d] rows: no dimension is broadcast.
inline bool addressable(const RowsParams& rows, std::int64_t batch, std::int64_t heads, std::int64_t n) {
  return rows.aligned && (batch == 1 || rows.batch_stride > 0) && (heads == 1 || rows.head_stride > 0) &&
         (n == 1 || rows.row_stride > 0);
}

// Head dims up to 64. matrices: batch * heads.
bool serves_qk_prune(const QkPruneParams& params, std::int64_t matrices);
void launch_qk_prune(DType dtype, QkPruneParams params, std::int64_t matrices, void* stream);

// d_v up to 64; interleaved groups of whole blocks.
bool serves_pv_sparse(const PvSparseParams& params, std::int64_t matrices);
void launch_pv_sparse(DType dtype, PvSparseParams params, std::int64_t matrices, void* stream);

}  // namespace dspattn::cuda::pipeline::sm90
