// The three-kernel pipeline's kernels that use Hopper's own instructions. They need compute capability 9.0; what they
// do not serve, the kernels of cuda/sm80 do.
#pragma once

#include <cstdint>

#include "cuda/sm80/params.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::sm90 {

// Whether the copy engine can address [batch, heads, n, d] rows: no dimension is broadcast.
inline bool addressable(const sm80::RowsParams& rows, std::int64_t batch, std::int64_t heads, std::int64_t n) {
  return rows.aligned && (batch == 1 || rows.batch_stride > 0) && (heads == 1 || rows.head_stride > 0) &&
         (n == 1 || rows.row_stride > 0);
}

// Head dims up to 64. matrices: batch * heads.
bool serves_qk_prune(const sm80::QkPruneParams& params, std::int64_t matrices);
void launch_qk_prune(DType dtype, sm80::QkPruneParams params, std::int64_t matrices, void* stream);

// d_v up to 64; interleaved groups of whole blocks.
bool serves_pv_sparse(const sm80::PvSparseParams& params, std::int64_t matrices);
void launch_pv_sparse(DType dtype, sm80::PvSparseParams params, std::int64_t matrices, void* stream);

}  // namespace dspattn::cuda::sm90
