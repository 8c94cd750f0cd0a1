// Results of a warpgroup's 64 rows: normalise, write the output rows and the log-sum-exps.
//
// Results are final, in C::kOutType, or one part of several that are to be merged by their log-sum-exps, in fp32: the
// view of the output says which. Final 16-bit rows leave from registers or by way of shared memory, from which TMA
// writes whole lines; fp32 rows, which would take twice the room there, leave from registers.
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "cuda/blocks/barriers.h"
#include "cuda/blocks/item.h"
#include "cuda/blocks/references.h"
#include "cuda/blocks/scales.h"
#include "cuda/blocks/views.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/tma.h"
#include "cuda/tile/key_map.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::blocks {

// The same kernel's results in fp32.
template <typename C>
struct InFp32 : C {
  static constexpr DType kOutType = DType::f32;
};

// Whether results leave in fp32; the same for all threads.
template <typename C>
__device__ __forceinline__ bool in_fp32(const OutView& view) {
  return C::kOutType == DType::f32 || view.fp32 != 0;
}

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

// Sums of a thread's two rows, over all their lanes.
struct RowSums {
  float sum0, sum1;
};

__device__ __forceinline__ RowSums sum_up(const RowState& state) {
  const auto over_quad = [](float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  };
  return {over_quad(state.sum0), over_quad(state.sum1)};
}

// What the output is multiplied by; rows that see no key are zeros. An fp32 output shows the last bit.
template <typename C>
__device__ __forceinline__ float inverse(float sum) {
  if (sum == 0) return 0.0f;
  return C::kOutType == DType::f32 ? __frcp_rn(sum) : ptx::reciprocal_fast(sum);
}

// Of a row whose weights, relative to the reference `-minus`, add up to `sum`.
template <typename C>
__device__ __forceinline__ float log_sum_exp(const ScoreScales& scales, float sum, float minus) {
  constexpr float kLn2 = 0.6931471805599453f;
  if constexpr (C::kReferenceIsScore) {
    return sum == 0 ? -INFINITY : fmaf(-minus, scales.exp2_scale, ptx::log2_fast(sum)) * kLn2;
  }
  // Of the reference, the part that is a score is taken at the precise scale.
  const float precise = C::kHalfExponentials ? scales.exp2_scale_ratio : 1.0f;
  const float score = -minus - C::kHeadroom;
  // An empty row has sum 0 and no reference: its logarithm is -inf.
  return sum == 0 ? -INFINITY : (ptx::log2_fast(sum) + fmaf(score, precise, C::kHeadroom)) * kLn2;
}

// Where a thread's two rows of results go: elements from the start of out, of lse, and whether they exist.
struct RowTargets {
  std::int64_t out0, out1;
  std::int64_t lse0, lse1;
  bool stored0, stored1;
};

// `row` is row g of the thread's warp within the item; row g + 8 is the other.
template <int kConsumers>
__device__ __forceinline__ RowTargets targets_of(const OutView& out, const LseView& lse, const Item<kConsumers>& item,
                                                 int row) {
  const int rows = item.rows - item.row_begin;
  const std::int64_t out0 = item.out_offset + row * out.row_stride;
  const std::int64_t lse0 = item.lse_offset + row * lse.row_stride;
  return {out0, out0 + 8 * out.row_stride, lse0, lse0 + 8 * lse.row_stride, row < rows, row + 8 < rows};
}

template <typename C>
__device__ __forceinline__ void store_lse(const LseView& view, const ScoreScales& scales, const RowTargets& to,
                                          int lane, const RowSums& sums, const RowState& state) {
  if (view.data == nullptr || (lane & 3) != 0) return;
  if (to.stored0) view.data[to.lse0] = log_sum_exp<C>(scales, sums.sum0, state.minus0);
  if (to.stored1) view.data[to.lse1] = log_sum_exp<C>(scales, sums.sum1, state.minus1);
}

template <typename C>
__device__ __forceinline__ void store_lse(const LseView& view, const ScoreScales& scales,
                                          const Item<C::kConsumers>& item, int row, int lane, const RowSums& sums,
                                          const RowState& state) {
  if (view.data != nullptr && (lane & 3) == 0) {
    const int rows = item.rows - item.row_begin;
    float* lse = view.data + item.lse_offset + row * view.row_stride;
    if (row < rows) *lse = log_sum_exp<C>(scales, sums.sum0, state.minus0);
    if (row + 8 < rows) lse[8 * view.row_stride] = log_sum_exp<C>(scales, sums.sum1, state.minus1);
  }
}

template <typename C>
__device__ __forceinline__ std::uint32_t pack_out(float low, float high) {
  return C::kOutType == DType::bf16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
}

// A warp's 16 rows of 16-bit output to shared memory, normalised. `tile` is the first of them in a swizzled tile.
// Returns where this lane has stored last.
template <typename C>
__device__ __forceinline__ std::uint32_t stage_rows(std::uint32_t tile, int lane, float (&out)[C::kHeadDim / 2],
                                                    const RowSums& sums) {
  if (!__all_sync(~0u, sums.sum0 != 0 && sums.sum1 != 0)) {  // a row without a key is 0, whatever V holds
#pragma unroll
    for (int i = 0; i < C::kHeadDim / 2; ++i) {
      if (((i & 2) == 0 ? sums.sum0 : sums.sum1) == 0) out[i] = 0;
    }
  }
  const float inverse0 = inverse<C>(sums.sum0);
  const float inverse1 = inverse<C>(sums.sum1);
  // Of a pair of 8-column blocks lane l addresses row l % 16 of block l / 16.
  const std::uint32_t row = tile + static_cast<std::uint32_t>(lane & 15) * 128;
  const std::uint32_t chunk = static_cast<std::uint32_t>((lane >> 4) ^ (lane & 7)) << 4;
  std::uint32_t at = row;
#pragma unroll
  for (int block = 0; block < C::kHeadDim / 8; block += 2) {
    const float* o = out + 4 * block;
    const std::uint32_t panel = static_cast<std::uint32_t>(block / 8) * C::kPanelQBytes;
    at = row + panel + (chunk ^ static_cast<std::uint32_t>(block % 8) << 4);
    ptx::store_matrices(at, pack_out<C>(o[0] * inverse0, o[1] * inverse0),
                        pack_out<C>(o[2] * inverse1, o[3] * inverse1), pack_out<C>(o[4] * inverse0, o[5] * inverse0),
                        pack_out<C>(o[6] * inverse1, o[7] * inverse1));
  }
  return at;
}

// Where a warp's rows go, the same in every lane and known to be.
struct OutTile {
  int warp_row;  // first of the rows within the item
  int rows;      // how many of the sequence's follow from there
  int out_row, head, batch;
};

template <int kConsumers>
__device__ __forceinline__ OutTile out_tile(const Item<kConsumers>& item, int warp_row) {
  return {warp_row, uniform(item.rows - item.row_begin) - warp_row, uniform(item.out_row) + warp_row,
          uniform(item.head), uniform(item.batch)};
}

// From there to the output. By TMA (`by_tma`; then lane 0 must wait for it before the buffer is used again); but where
// it cannot address the output, or the warp's rows do not all exist and others may follow (`packed`), the warp copies.
template <typename C>
__device__ __forceinline__ void send_rows(const OutView& view, const CUtensorMap& map, bool by_tma, bool packed,
                                          int vector, const Item<C::kConsumers>& item, const OutTile& to,
                                          std::uint32_t tile, int lane) {
  const auto [warp_row, rows, out_row, head, batch] = to;
  if (by_tma && (rows >= kStoredRows || !packed)) {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel) {
        ptx::tma_store_4d(&map, tile + static_cast<std::uint32_t>(panel) * C::kPanelQBytes, panel * 64, out_row, head,
                          batch);
      }
      ptx::tma_store_commit();
    }
    return;
  }
  __syncwarp();
  const int stored = rows < kStoredRows ? rows : kStoredRows;
  const int width = !C::kGeneral || vector != 0 ? 8 : 1;  // elements a lane copies at once
  const int pieces = view.columns / width;
  auto* base = static_cast<std::uint16_t*>(view.data) + item.out_offset + warp_row * view.row_stride;
#pragma unroll 1
  for (int i = lane; i < stored * pieces; i += 32) {
    const int row = i / pieces;
    const int column = (i - row * pieces) * width;
    const std::uint32_t from = tile + static_cast<std::uint32_t>((column >> 6) * C::kPanelQBytes +
                                                                 tile::swizzled_offset(row, (column & 63) >> 3));
    std::uint16_t* target = base + row * view.row_stride + column;
    if (!C::kGeneral || width == 8) {
      const float4 x = ptx::load_shared_16(from);
      ptx::store_global_16(target, __float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                           __float_as_uint(x.w));
    } else {
      const std::uint32_t pair = ptx::load_shared(from + 4u * static_cast<std::uint32_t>((column & 7) >> 1));
      *target = static_cast<std::uint16_t>((column & 1) != 0 ? pair >> 16 : pair);
    }
  }
  __syncwarp();
}

// A warp's rows of an item none of which sees a key.
template <typename C>
__device__ __forceinline__ void store_zeros(const OutView& view, const Item<C::kConsumers>& item, int warp_row,
                                            int lane) {
  const int rows = item.rows - item.row_begin - warp_row;
  const int halves = in_fp32<C>(view) ? 2 : 1;  // of an element
  auto* base = static_cast<std::uint16_t*>(view.data) + halves * (item.out_offset + warp_row * view.row_stride);
#pragma unroll 1
  for (int row = 0; row < (rows < kStoredRows ? rows : kStoredRows); ++row) {
#pragma unroll 1
    for (int i = lane; i < halves * view.columns; i += 32) base[halves * (row * view.row_stride) + i] = 0;
  }
}

// 16-bit rows from registers. `vector`: rows are 16-byte aligned and d_v is a multiple of 8.
template <typename C>
__device__ __forceinline__ void store_rows_16bit(const OutView& view, int vector, const RowTargets& to, int lane,
                                                 const float (&out)[C::kHeadDim / 2], const RowSums& sums) {
  const int t = lane & 3;
  const bool stored0 = to.stored0;
  const bool stored1 = to.stored1;
  const float inverse0 = inverse<C>(sums.sum0);
  const float inverse1 = inverse<C>(sums.sum1);
  auto* base = static_cast<std::uint16_t*>(view.data) + to.out0;
  auto* base8 = static_cast<std::uint16_t*>(view.data) + to.out1;
#pragma unroll
  for (int i = 0; i < C::kHeadDim / 32; ++i) {
    std::uint32_t x[4], y[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float* o = out + 16 * i + 4 * b;
      x[b] = sums.sum0 == 0 ? 0u : pack_out<C>(o[0] * inverse0, o[1] * inverse0);
      y[b] = sums.sum1 == 0 ? 0u : pack_out<C>(o[2] * inverse1, o[3] * inverse1);
    }
    if (!C::kGeneral || vector != 0) {  // lane t takes columns 8t..8t+7 of these 32
      transpose_quad(x, t);
      transpose_quad(y, t);
      const int column = 32 * i + 8 * t;
      if (stored0 && column < view.columns) ptx::store_global_16(base + column, x[0], x[1], x[2], x[3]);
      if (stored1 && column < view.columns) ptx::store_global_16(base8 + column, y[0], y[1], y[2], y[3]);
    } else {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int column = 32 * i + 8 * b + 2 * t;
        if (stored0 && column < view.columns) base[column] = static_cast<std::uint16_t>(x[b]);
        if (stored0 && column + 1 < view.columns) base[column + 1] = static_cast<std::uint16_t>(x[b] >> 16);
        if (stored1 && column < view.columns) base8[column] = static_cast<std::uint16_t>(y[b]);
        if (stored1 && column + 1 < view.columns) base8[column + 1] = static_cast<std::uint16_t>(y[b] >> 16);
      }
    }
  }
}

// fp32 rows from registers. `vector`: rows are 8-byte aligned and d_v is even.
template <typename C>
__device__ __forceinline__ void store_rows_fp32(const OutView& view, int vector, const RowTargets& targets, int lane,
                                                const float (&out)[C::kHeadDim / 2], const RowSums& sums) {
  const auto store = [&](bool stored, std::int64_t offset, const float* o, float sum) {
    if (!stored) return;
    float* to = static_cast<float*>(view.data) + offset;
    const float factor = inverse<C>(sum);
#pragma unroll
    for (int block = 0; block < C::kHeadDim / 8; ++block) {
      const int column = 8 * block + 2 * (lane & 3);
      const float x = sum == 0 ? 0.0f : o[4 * block] * factor;
      const float y = sum == 0 ? 0.0f : o[4 * block + 1] * factor;
      if (!C::kGeneral || vector != 0) {
        if (column < view.columns) ptx::store_global_8(to + column, x, y);
      } else {
        if (column < view.columns) to[column] = x;
        if (column + 1 < view.columns) to[column + 1] = y;
      }
    }
  };
  store(targets.stored0, targets.out0, out, sums.sum0);
  store(targets.stored1, targets.out1, out + 2, sums.sum1);
}

template <typename C>
__device__ __forceinline__ void store_rows(const OutView& view, int vector, const RowTargets& to, int lane,
                                           const float (&out)[C::kHeadDim / 2], const RowSums& sums) {
  if constexpr (C::kOutType != DType::f32) {
    if (!in_fp32<C>(view)) return store_rows_16bit<C>(view, vector, to, lane, out, sums);
  }
  store_rows_fp32<InFp32<C>>(view, vector, to, lane, out, sums);
}
template <typename C>
__device__ __forceinline__ void store_rows(const OutView& view, int vector, const Item<C::kConsumers>& item, int row,
                                           int lane, const float (&out)[C::kHeadDim / 2], const RowSums& sums) {
  store_rows<C>(view, vector, targets_of(view, LseView{}, item, row), lane, out, sums);
}

}  // namespace dspattn::cuda::blocks
