// What the kernels that write means of V (means.h) have in common: where a sequence lies, and its V.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/means.h"
#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::blocks {

inline constexpr int kWidth = 8;   // columns of V that a thread loads at once: 16 bytes
inline constexpr int kAtOnce = 4;  // keys whose V a thread of sum_blocks() loads together: the fewest it has of a block

// Where a sequence lies and which keys it has.
struct Sequence {
  tile::MeanTable::Sequence place;
  int batch = 0;  // of V
  int rows = 0, keys = 0;
  int key_length = 0;  // of which so many are seen
};

__device__ __forceinline__ Sequence sequence_of(const MeansParams& params, int index) {
  const WorkParams& work = params.work;
  Sequence sequence{{index, 0, 0}, index, work.n_q, work.n_k, 0};
  if (work.cumulative_q.present()) {
    const tile::RowSpan queries = tile::packed_span(work.cumulative_q, index, work.q_rows, work.n_q);
    const tile::RowSpan keys = tile::packed_span(work.cumulative_k, index, work.k_rows, work.n_k);
    sequence = {{index, keys.begin, queries.begin}, 0, queries.count, keys.count, 0};
  }
  sequence.key_length = tile::visible_keys(work.key_lengths, index, sequence.keys);
  return sequence;
}

// V of one head of a sequence, and which of its keys no mask hides.
struct Values {
  const MeansParams& params;
  const std::uint16_t* rows;
  std::int64_t allowed, bias;  // elements of the masks at key 0

  __device__ __forceinline__ Values(const MeansParams& p, const Sequence& sequence, int head) : params(p) {
    rows = static_cast<const std::uint16_t*>(p.v.data) +
           p.v.offset(sequence.batch, p.heads_per_key_head.quotient(head), sequence.place.k_row);
    allowed = sequence.place.index * p.allowed.batch_stride + head * p.allowed.head_stride;
    bias = sequence.place.index * p.bias.batch_stride + head * p.bias.head_stride;
  }

  __device__ __forceinline__ bool hidden(int key) const {
    if (params.allowed.data != nullptr &&
        static_cast<const std::uint8_t*>(params.allowed.data)[allowed + key * params.allowed.key_stride] == 0) {
      return true;
    }
    if (params.bias.data == nullptr) return false;
    const std::int64_t at = bias + key * params.bias.key_stride;
    if (params.bias_bytes == 4) return static_cast<const float*>(params.bias.data)[at] == -INFINITY;
    const std::uint16_t bits = static_cast<const std::uint16_t*>(params.bias.data)[at];
    return bits == (params.type == DType::bf16 ? 0xFF80u : 0xFC00u);
  }

  __device__ __forceinline__ float number(std::uint32_t low_half) const {
    return params.type == DType::bf16 ? number<DType::bf16>(low_half) : number<DType::f16>(low_half);
  }
  template <DType kType>
  __device__ __forceinline__ static float number(std::uint32_t low_half) {
    if constexpr (kType == DType::bf16) return __uint_as_float(low_half << 16);
    float low, high;
    ptx::unpack_f16x2(low_half & 0xFFFFu, low, high);
    return low;
  }
  // One column; 0 past the last.
  __device__ __forceinline__ float at(int key, int column) const {
    return column < params.columns ? number(rows[key * params.v.row_stride + column]) : 0.0f;
  }
  __device__ __forceinline__ void add(const uint4& x, float (&sums)[kWidth]) const {
    if (params.type == DType::bf16) {
      add<DType::bf16>(x, sums);
    } else {
      add<DType::f16>(x, sums);
    }
  }
  template <DType kType>
  __device__ __forceinline__ static void add(const uint4& x, float (&sums)[kWidth]) {
    const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[2 * i] += number<kType>(words[i]);
      sums[2 * i + 1] += number<kType>(words[i] >> 16);
    }
  }
  // Aligned rows, none of which a mask hides.
  __device__ __forceinline__ bool simple() const {
    return params.vector != 0 && params.allowed.data == nullptr && params.bias.data == nullptr;
  }
  // Of kAtOnce such keys; all loads are on their way before the first sum.
  __device__ __forceinline__ void load_together(int key, int column, uint4 (&x)[kAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      x[i] = make_uint4(0, 0, 0, 0);
      if (column < params.columns) {
        x[i] = *reinterpret_cast<const uint4*>(rows + (key + i) * params.v.row_stride + column);
      }
    }
  }
  // kWidth columns from `from` on, or, where rows are not 16-byte aligned, as many as there are.
  template <bool kVector>
  __device__ __forceinline__ static uint4 load(const std::uint16_t* from, int columns) {
    if constexpr (kVector) return *reinterpret_cast<const uint4*>(from);
    const auto pair = [&](int i) {
      const std::uint32_t low = i < columns ? from[i] : 0u;
      const std::uint32_t high = i + 1 < columns ? from[i + 1] : 0u;
      return low | high << 16;
    };
    return make_uint4(pair(0), pair(2), pair(4), pair(6));
  }
  // Adds kWidth columns from `column` on to `sums`.
  __device__ __forceinline__ void add(int key, int column, float (&sums)[kWidth]) const {
    if (column >= params.columns) return;
    const std::uint16_t* from = rows + key * params.v.row_stride + column;
    if (params.vector != 0) {
      add(*reinterpret_cast<const uint4*>(from), sums);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (column + i < params.columns) sums[i] += number(from[i]);
      }
    }
  }
};

// An entry's number; of no key 0. A division would be a call, around which registers are spilled.
__device__ __forceinline__ float mean_of(float sum, int count) {
  return count > 0 ? sum * ptx::reciprocal_fast(static_cast<float>(count)) : 0.0f;
}

}  // namespace dspattn::cuda::blocks
