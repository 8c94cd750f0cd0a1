// Results of a warpgroup's 64 rows: normalise, write the output rows and the log-sum-exp.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused_tf32/softmax.h"

namespace dspattn::cuda::sm90::tf32 {

// `row` is row g of the thread's warp within the item; row g + 8 is the other.
template <typename C>
__device__ __forceinline__ void store_rows(const FusedParams& params, const Item<C::kConsumers>& item, int row,
                                           int lane, const float (&out)[C::kHeadDim / 2], const RowState& state) {
  const int t = lane & 3;
  const auto over_quad = [](float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  };
  const float sum0 = over_quad(state.sum0);
  const float sum1 = over_quad(state.sum1);
  const int rows = item.rows - item.row_begin;
  const bool stored0 = row < rows;
  const bool stored1 = row + 8 < rows;
  if (params.lse != nullptr && t == 0) {
    constexpr float kLn2 = 0.6931471805599453f;
    float* lse = params.lse + item.lse_offset + row * params.lse_row_stride;
    // An empty row has sum 0 and no reference: its logarithm is -inf.
    if (stored0) *lse = sum0 == 0 ? -INFINITY : (__log2f(sum0) - state.minus0) * kLn2;
    if (stored1) lse[8 * params.lse_row_stride] = sum1 == 0 ? -INFINITY : (__log2f(sum1) - state.minus1) * kLn2;
  }
  const float inverse0 = sum0 == 0 ? 0.0f : __frcp_rn(sum0);
  const float inverse1 = sum1 == 0 ? 0.0f : __frcp_rn(sum1);
  float* base = static_cast<float*>(params.out) + item.out_offset + row * params.out_row_stride;
  float* base8 = base + 8 * params.out_row_stride;
  const auto put = [&](float* to, int column, float x, float y, float inverse, float sum) {
    x = sum == 0 ? 0.0f : x * inverse;
    y = sum == 0 ? 0.0f : y * inverse;
    if (!C::kGeneral || params.vector_out != 0) {
      if (column < params.d_v) ptx::store_global_8(to + column, x, y);
    } else {
      if (column < params.d_v) to[column] = x;
      if (column + 1 < params.d_v) to[column + 1] = y;
    }
  };
#pragma unroll
  for (int block = 0; block < C::kHeadDim / 8; ++block) {
    const int column = 8 * block + 2 * t;
    if (stored0) put(base, column, out[4 * block], out[4 * block + 1], inverse0, sum0);
    if (stored1) put(base8, column, out[4 * block + 2], out[4 * block + 3], inverse1, sum1);
  }
}

}  // namespace dspattn::cuda::sm90::tf32
