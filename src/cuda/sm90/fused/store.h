// Results of a warpgroup's 64 rows: normalise, write the output rows and the log-sum-exp.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused/softmax.h"

namespace dspattn::cuda::sm90 {

// Word i of lane t becomes word t of lane i, within each quad.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&x)[4], int t) {
  const bool odd = (t & 1) != 0;
  const std::uint32_t a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
  const std::uint32_t b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
  (odd ? x[0] : x[1]) = a;
  (odd ? x[2] : x[3]) = b;
  const bool upper = (t & 2) != 0;
  const std::uint32_t c = __shfl_xor_sync(~0u, upper ? x[0] : x[2], 2);
  const std::uint32_t d = __shfl_xor_sync(~0u, upper ? x[1] : x[3], 2);
  (upper ? x[0] : x[2]) = c;
  (upper ? x[1] : x[3]) = d;
}

// `row` is row g of the thread's warp within the item; row g + 8 is the other.
template <typename C>
__device__ __forceinline__ void store_rows(const FusedParams& params, const Item<C::kConsumers>& item, int row,
                                           int lane, float (&out)[C::kHeadDim / 2], const RowState& state) {
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
  const float inverse0 = sum0 == 0 ? 0.0f : __fdividef(1.0f, sum0);
  const float inverse1 = sum1 == 0 ? 0.0f : __fdividef(1.0f, sum1);
  const auto pack = [](float low, float high) {
    return C::kType == DType::bf16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
  };
  auto* base = static_cast<std::uint16_t*>(params.out) + item.out_offset + row * params.out_row_stride;
  std::uint16_t* base8 = base + 8 * params.out_row_stride;
#pragma unroll
  for (int i = 0; i < C::kHeadDim / 32; ++i) {
    std::uint32_t x[4], y[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float* o = out + 16 * i + 4 * b;
      x[b] = sum0 == 0 ? 0u : pack(o[0] * inverse0, o[1] * inverse0);
      y[b] = sum1 == 0 ? 0u : pack(o[2] * inverse1, o[3] * inverse1);
    }
    if (!C::kGeneral || params.vector_out != 0) {  // lane t takes columns 8t..8t+7 of these 32
      transpose_quad(x, t);
      transpose_quad(y, t);
      const int column = 32 * i + 8 * t;
      if (stored0 && column < params.d_v) ptx::store_global_16(base + column, x[0], x[1], x[2], x[3]);
      if (stored1 && column < params.d_v) ptx::store_global_16(base8 + column, y[0], y[1], y[2], y[3]);
    } else {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int column = 32 * i + 8 * b + 2 * t;
        if (stored0 && column < params.d_v) base[column] = static_cast<std::uint16_t>(x[b]);
        if (stored0 && column + 1 < params.d_v) base[column + 1] = static_cast<std::uint16_t>(x[b] >> 16);
        if (stored1 && column < params.d_v) base8[column] = static_cast<std::uint16_t>(y[b]);
        if (stored1 && column + 1 < params.d_v) base8[column + 1] = static_cast<std::uint16_t>(y[b] >> 16);
      }
    }
  }
}

}  // namespace dspattn::cuda::sm90
