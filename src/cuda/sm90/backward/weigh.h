// From pruned scores to P and dS of a query tile, and how tiles with keys as rows pass through shared memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/scores16.h"
#include "cuda/sm90/backward/products.h"
#include "cuda/sm90/backward/scores.h"

namespace dspattn::cuda::sm90::backward {

template <typename C>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  return C::kType == DType::bf16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
}

// A lane's two neighbouring queries: log-sum-exps and D.
struct QueryPair {
  float lse[2], d[2];

  __device__ __forceinline__ void load(const RowNumbers* first) {
    const float4 x = ptx::load_shared_16(ptx::shared_address(first));
    lse[0] = x.x;
    d[0] = x.y;
    lse[1] = x.z;
    d[1] = x.w;
  }
};

// Those of a tile: as many pairs as there are registers for are loaded before the tile's products are waited for. While
// the tensor core reads operands a load takes hundreds of clocks.
template <typename C>
struct NumbersAhead {
  const RowNumbers* rows;  // of the lane's first pair
  QueryPair pairs[C::kNumbersAhead > 0 ? C::kNumbersAhead : 1];

  __device__ __forceinline__ NumbersAhead(const RowNumbers* numbers, int thread) : rows(numbers + 2 * (thread & 3)) {}
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int j = 0; j < C::kNumbersAhead; ++j) pairs[j].load(rows + 8 * j);
  }
};

// Packed scores become P, as an operand of dV, and with dP in d_weights dS. kNan: a row's log-sum-exp is NaN, and so is
// what it gives to every key that it sees, and to no other.
template <typename C, bool kNan, bool kWithDScores>
__device__ __forceinline__ void weigh_tile(float scale, const NumbersAhead<C>& numbers, TileOperand<C>& weights,
                                           const float* d_weights, std::uint32_t* d_scores) {
  QueryPair pairs[C::kTileQ / 8];
#pragma unroll
  for (int j = 0; j < C::kTileQ / 8; ++j) {
    if (j < C::kNumbersAhead) {
      pairs[j] = numbers.pairs[j];
    } else {
      pairs[j].load(numbers.rows + 8 * j);
    }
  }
#pragma unroll
  for (int j = 0; j < C::kTileQ / 8; ++j) {
    const QueryPair& queries = pairs[j];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int word = 2 * j + i;
      float p[2], ds[2];
      ptx::unpack_f16x2(weights[word], p[0], p[1]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool masked = kNan && p[h] == kLowestScore;
        p[h] = masked ? 0.0f : ptx::exp2_fast(fmaf(p[h], scale, -queries.lse[h]));
        if constexpr (kWithDScores) ds[h] = masked ? 0.0f : p[h] * (d_weights[2 * word + h] - queries.d[h]);
      }
      weights[word] = pack_pair<C>(p[0], p[1]);
      if constexpr (kWithDScores) d_scores[word] = pack_pair<C>(ds[0], ds[1]);
    }
  }
}

template <typename C, bool kWithDScores>
__device__ __forceinline__ void weigh_any(const BackwardParams& params, const NumbersAhead<C>& numbers, bool has_nan,
                                          TileOperand<C>& weights, const float* d_weights, std::uint32_t* d_scores) {
  const float scale = params.scales.exp2_scale;
  if (!has_nan) {
    weigh_tile<C, false, kWithDScores>(scale, numbers, weights, d_weights, d_scores);
  } else {
    weigh_tile<C, true, kWithDScores>(scale, numbers, weights, d_weights, d_scores);
  }
}
template <typename C>
__device__ __forceinline__ void weigh(const BackwardParams& params, const NumbersAhead<C>& numbers, bool has_nan,
                                      TileOperand<C>& weights, const TileScores<C>& d_weights,
                                      TileOperand<C>& d_scores) {
  weigh_any<C, true>(params, numbers, has_nan, weights, d_weights, d_scores);
}
template <typename C>
__device__ __forceinline__ void weigh(const BackwardParams& params, const NumbersAhead<C>& numbers, bool has_nan,
                                      TileOperand<C>& weights) {
  weigh_any<C, false>(params, numbers, has_nan, weights, nullptr, nullptr);
}

// Part `part` of a tile: rows are keys, columns queries in panels of 64.
template <typename C>
__device__ __forceinline__ void store_key_tile(std::uint8_t* tile, int part, int thread, const TileOperand<C>& values) {
  const int row = part * kPartKeys + (thread >> 5) * 16 + (thread & 15);
  const std::uint32_t chunk = static_cast<std::uint32_t>((thread >> 4 & 1) ^ (thread & 7)) << 4;
  const std::uint32_t at = ptx::shared_address(tile) + static_cast<std::uint32_t>(row) * 128;
#pragma unroll
  for (int step = 0; step < C::kTileQ / 16; ++step) {  // 16 queries: two chunks of a row
    const std::uint32_t* x = values + 4 * step;
    ptx::store_matrices(at + static_cast<std::uint32_t>(step / 4 * C::kPanelKBytes) +
                            (chunk ^ static_cast<std::uint32_t>(step % 4) << 5),
                        x[0], x[1], x[2], x[3]);
  }
}

// From a thread to the same thread of the other key warpgroup.
template <typename C>
__device__ __forceinline__ void hand_over(std::uint32_t (&to)[C::kTileQ / 16][128][4], int thread,
                                          const PackedTile<C>& words) {
#pragma unroll
  for (int i = 0; i < C::kTileQ / 16; ++i) {
    ptx::store_shared_16(ptx::shared_address(to[i][thread]), words[4 * i], words[4 * i + 1], words[4 * i + 2],
                         words[4 * i + 3]);
  }
}
template <typename C>
__device__ __forceinline__ void take_over(const std::uint32_t (&from)[C::kTileQ / 16][128][4], int thread,
                                          PackedTile<C>& words) {
#pragma unroll
  for (int i = 0; i < C::kTileQ / 16; ++i) {
    const float4 x = ptx::load_shared_16(ptx::shared_address(from[i][thread]));
    words[4 * i] = __float_as_uint(x.x);
    words[4 * i + 1] = __float_as_uint(x.y);
    words[4 * i + 2] = __float_as_uint(x.z);
    words[4 * i + 3] = __float_as_uint(x.w);
  }
}

}  // namespace dspattn::cuda::sm90::backward
