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

// A lane's log-sum-exps of a query tile. While the tensor core reads operands a load takes hundreds of clocks: so all
// are asked for before its products are waited for.
template <typename C>
struct RowLses {
  float of[C::kTileQ / 8][2];  // queries 8j + 2t and the next

  __device__ __forceinline__ RowLses(const float* tile, int thread) {
#pragma unroll
    for (int j = 0; j < C::kTileQ / 8; j += 2) {
      const float4 x = ptx::load_shared_16(ptx::shared_address(tile + 8 * j + 4 * (thread & 3)));
      of[j][0] = x.x;
      of[j][1] = x.y;
      of[j + 1][0] = x.z;
      of[j + 1][1] = x.w;
    }
  }
};

// -D, which the accumulators of dP begin with.
template <typename C>
__device__ __forceinline__ void load_minus_d(const float* minus_d, int thread, TileScores<C>& d_weights) {
#pragma unroll
  for (int j = 0; j < C::kTileQ / 8; ++j) {
    const std::uint32_t from = ptx::shared_address(minus_d + C::kCopiesOfD * (8 * j + 2 * (thread & 3)));
    std::uint32_t x[2 * C::kCopiesOfD];
    ptx::load_shared_bytes<8 * C::kCopiesOfD>(from, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) d_weights[4 * j + i] = __uint_as_float(x[i % (2 * C::kCopiesOfD)]);
  }
}

// A word of packed scores, of one key and two queries, becomes P, as an operand of dV, and with dP - D in `d_weights`
// dS. kNan: a row's log-sum-exp is NaN, and so is what it gives to every key that it sees, and to no other.
template <typename C, bool kNan, bool kWithDScores>
__device__ __forceinline__ void weigh_word(float scale, const float (&lse)[2], std::uint32_t& weights,
                                           const float* d_weights, std::uint32_t* d_scores) {
  float p[2], ds[2];
  ptx::unpack_f16x2(weights, p[0], p[1]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool masked = kNan && p[h] == kLowestScore;
    p[h] = masked ? 0.0f : ptx::exp2_fast(fmaf(p[h], scale, -lse[h]));
    if constexpr (kWithDScores) ds[h] = masked ? 0.0f : p[h] * d_weights[h];
  }
  weights = pack_pair<C>(p[0], p[1]);
  if constexpr (kWithDScores) *d_scores = pack_pair<C>(ds[0], ds[1]);
}

template <typename C, bool kNan, bool kWithDScores>
__device__ __forceinline__ void weigh_tile(float scale, const RowLses<C>& lses, TileOperand<C>& weights,
                                           const float* d_weights, std::uint32_t* d_scores) {
#pragma unroll
  for (int word = 0; word < C::kTileQ / 4; ++word) {
    weigh_word<C, kNan, kWithDScores>(scale, lses.of[word / 2], weights[word], d_weights + 2 * word, d_scores + word);
  }
}

template <typename C, bool kWithDScores>
__device__ __forceinline__ void weigh_any(const BackwardParams& params, const RowLses<C>& lses, bool has_nan,
                                          TileOperand<C>& weights, const float* d_weights, std::uint32_t* d_scores) {
  const float scale = params.scales.exp2_scale;
  if (!has_nan) {
    weigh_tile<C, false, kWithDScores>(scale, lses, weights, d_weights, d_scores);
  } else {
    weigh_tile<C, true, kWithDScores>(scale, lses, weights, d_weights, d_scores);
  }
}
template <typename C>
__device__ __forceinline__ void weigh(const BackwardParams& params, const RowLses<C>& lses, bool has_nan,
                                      TileOperand<C>& weights, const TileScores<C>& d_weights,
                                      TileOperand<C>& d_scores) {
  weigh_any<C, true>(params, lses, has_nan, weights, d_weights, d_scores);
}
template <typename C>
__device__ __forceinline__ void weigh(const BackwardParams& params, const RowLses<C>& lses, bool has_nan,
                                      TileOperand<C>& weights) {
  weigh_any<C, false>(params, lses, has_nan, weights, nullptr, nullptr);
}

// Of 1:2 the two keys of a lane are a group: one exponential for both.
template <typename C>
__device__ __forceinline__ void weigh_larger(float scale, const float (&lse)[2], std::uint32_t* weights,
                                             const float* d_weights, std::uint32_t* d_scores) {
  const tile::KeptHalf kept = tile::keep_one_of_two(weights[0], weights[1]);
  float p[2];
  ptx::unpack_f16x2(ptx::max_f16x2(weights[0], weights[1]), p[0], p[1]);
#pragma unroll
  for (int h = 0; h < 2; ++h) p[h] = ptx::exp2_fast(fmaf(p[h], scale, -lse[h]));
  const std::uint32_t both = pack_pair<C>(p[0], p[1]);
  weights[0] = both & kept.first;
  weights[1] = both & kept.second;
  d_scores[0] = pack_pair<C>(p[0] * d_weights[0], p[1] * d_weights[1]) & kept.first;
  d_scores[1] = pack_pair<C>(p[0] * d_weights[2], p[1] * d_weights[3]) & kept.second;
}

// From packed scores to P and dS, two keys and two queries at a time, so that exponentials of some are taken beside the
// comparisons of others. What prune_ahead() has pruned is: of a tile with a NaN all.
template <typename C>
__device__ __forceinline__ void prune_and_weigh(const BackwardParams& params, const Halves<C>& halves,
                                                const RowLses<C>& lses, bool has_nan, TileOperand<C>& weights,
                                                const TileScores<C>& d_weights, TileOperand<C>& d_scores) {
  const float scale = params.scales.exp2_scale;
  if (!has_nan) {
#pragma unroll
    for (int j = 0; j < C::kTileQ / 8; ++j) {
      if constexpr (C::kSelection == Selection::one_of_two) {
        weigh_larger<C>(scale, lses.of[j], weights + 2 * j, d_weights + 4 * j, d_scores + 2 * j);
        continue;
      }
      if (j >= C::kPrunedAhead) select_pair<C, false>(weights[2 * j], weights[2 * j + 1], halves, j);
#pragma unroll
      for (int word = 2 * j; word < 2 * j + 2; ++word) {
        weigh_word<C, false, true>(scale, lses.of[j], weights[word], d_weights + 2 * word, d_scores + word);
      }
    }
  } else {
    weigh_tile<C, true, true>(scale, lses, weights, d_weights, d_scores);
  }
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
