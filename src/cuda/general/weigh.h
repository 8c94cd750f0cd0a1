// From a tile's scores to weights: selected, exponentiated relative to a reference, packed for the output product.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/scores32.h"
#include "cuda/blocks/weigh16.h"
#include "cuda/general/params.h"
#include "cuda/general/products.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/tile/select_any.h"

namespace dspattn::cuda::general {

// Makes -inf of all but the `keep` largest scores of each group.
template <typename C>
__device__ __forceinline__ void prune(float (&scores)[C::kTileK / 2], int keep, int places_log2, int t) {
  constexpr int kPlaces = C::kTileK / 4;
  const auto exchange = [](auto word, int x) { return __shfl_xor_sync(~0u, word, x); };
  std::uint32_t kept[kPlaces];
  if constexpr (C::kIsFp32) {
#pragma unroll
    for (int row = 0; row < 4; row += 2) {
      float left[kPlaces];
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) left[i] = scores[4 * (i >> 1) + (i & 1) + row];
      tile::keep_largest<tile::SingleKeys>(left, kept, keep, places_log2, t, exchange);
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        float& score = scores[4 * (i >> 1) + (i & 1) + row];
        score = kept[i] != 0 ? score : -INFINITY;
      }
    }
  } else {
    std::uint32_t left[kPlaces];
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const float* score = scores + 4 * (i >> 1) + (i & 1);
      left[i] = ptx::pack_f16x2_clamped(score[0], score[2]);
    }
    tile::keep_largest<tile::PackedKeys>(left, kept, keep, places_log2, t, exchange);
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      float* score = scores + 4 * (i >> 1) + (i & 1);
      score[0] = (kept[i] & 0xFFFFu) != 0 ? score[0] : -INFINITY;
      score[2] = kept[i] >> 16 != 0 ? score[2] : -INFINITY;
    }
  }
}

// Weights of all scores, in the order of a dense A operand, and their sums, unrounded, added to tile0 and tile1. kFar:
// see blocks/scores32.h. tf32: half a unit is added because the tensor core drops the bits below.
template <typename C, bool kFar>
__device__ __forceinline__ void weigh_all(RowBlock<C>& block, float scale, float& tile0, float& tile1) {
  const float minus0 = block.state.minus0 * scale;
  const float minus1 = block.state.minus1 * scale;
  constexpr std::uint32_t kHalfUnit = C::kIsTf32 ? 0x1000 : 0;
#pragma unroll
  for (int i = 0; i < C::kTileK / 8; ++i) {
    const float* score = block.scores + 4 * i;
    float weight[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float minus = j < 2 ? minus0 : minus1;
      const float reference = j < 2 ? block.state.minus0 : block.state.minus1;
      weight[j] = ptx::exp2_fast(kFar ? (score[j] + reference) * scale : fmaf(score[j], scale, minus));
    }
    tile0 += weight[0] + weight[1];
    tile1 += weight[2] + weight[3];
    if constexpr (C::kType == DType::bf16) {
      block.weights[2 * i] = ptx::pack_bf16x2(weight[0], weight[1]);
      block.weights[2 * i + 1] = ptx::pack_bf16x2(weight[2], weight[3]);
    } else if constexpr (C::kType == DType::f16) {
      block.weights[2 * i] = ptx::pack_f16x2(weight[0], weight[1]);
      block.weights[2 * i + 1] = ptx::pack_f16x2(weight[2], weight[3]);
    } else {
      // The order of a tf32 A operand: rows g and g + 8 of column 2t, then of 2t + 1; without tensor cores as scores.
      constexpr int kSecond = C::kIsTf32 ? 2 : 1;
      block.weights[4 * i] = __float_as_uint(weight[0]) + kHalfUnit;
      block.weights[4 * i + kSecond] = __float_as_uint(weight[1]) + kHalfUnit;
      block.weights[4 * i + 3 - kSecond] = __float_as_uint(weight[2]) + kHalfUnit;
      block.weights[4 * i + 3] = __float_as_uint(weight[3]) + kHalfUnit;
    }
  }
}

// A reference that is a score: `pairs` and all dense products.
template <typename C>
__device__ __forceinline__ void weigh_scores(RowBlock<C>& block, const ScoreScales& scales,
                                             const tile::QuadTranspose& transpose, float& tile0, float& tile1) {
  const float scale = scales.exp2_scale;
  const float largest = fmaxf(fabsf(block.state.minus0), fabsf(block.state.minus1)) * scale;
  const bool far = __all_sync(~0u, !(largest > blocks::tf32::kLargestNearReference)) == 0;
  const auto weigh = [&]<bool kFar>() {
    if constexpr (C::kKind == Kind::pairs) {
      blocks::tf32::weigh_tile<C, kFar>(block.scores, transpose, scale, block.state, block.weights, block.metadata,
                                        tile0, tile1);
    } else {
      weigh_all<C, kFar>(block, scale, tile0, tile1);
    }
  };
  if (far) {
    weigh.template operator()<true>();
  } else {
    weigh.template operator()<false>();
  }
}

// Weighs a tile: relative to the reference there is, or where that is too small, or there is none yet (`first`), to one
// raised to the tile's largest scores. weigh(tile0, tile1) adds to sums of weights; raise() raises.
template <typename C, typename Weigh, typename Raise>
__device__ __forceinline__ void weigh_tile(RowBlock<C>& block, bool first, Weigh weigh, Raise raise) {
  bool raises = first;
  float tile0, tile1;
#pragma unroll 1
  for (;;) {
    blocks::Raised raised{};
    if (raises) {
      raised = raise();
      blocks::shrink(raised, block.state, block.out);
    }
    tile0 = tile1 = 0;
    weigh(tile0, tile1);
    if (raises) blocks::forget_unset(raised, block.state);
    // False also for NaN: a row without a reference.
    if (raises || __all_sync(~0u, tile0 < C::kWeightLimit && tile1 < C::kWeightLimit) != 0) break;
    raises = true;
  }
  block.state.sum0 += tile0;
  block.state.sum1 += tile1;
}

// The scores of `fours`: selection on packed fp16, references are logarithms.
template <typename S, typename C>
__device__ __forceinline__ void weigh_fours(RowBlock<C>& block, const ScoreScales& scales, int lane, bool first) {
  const blocks::PackedScores<S, blocks::Hidden::nothing> packed{block.scores};
  blocks::Weigher<S> weigher(scales, lane);
  weigh_tile<C>(
      block, first,
      [&](float& tile0, float& tile1) {
        weigher.state = block.state;
        weigher.weigh(packed, block, [] {});
        tile0 = weigher.tile0;
        tile1 = weigher.tile1;
      },
      [&] { return blocks::raise_reference<S>(packed, scales, block.state); });
}

// From the scores of 16 rows, masked, to weights.
template <typename C>
__device__ __forceinline__ void weigh_rows(const ForwardParams& params, RowBlock<C>& block, int lane, bool first) {
  if constexpr (C::kKind == Kind::fours) {
    if (params.one_of_two != 0) {
      weigh_fours<Selecting<C, Selection::one_of_two>>(block, params.scales, lane, first);
    } else {
      weigh_fours<Selecting<C, Selection::two_of_four>>(block, params.scales, lane, first);
    }
  } else {
    if constexpr (C::kKind != Kind::pairs) {
      if (params.keep != 0) prune<C>(block.scores, params.keep, params.tiles.places_log2, lane & 3);
    }
    const tile::QuadTranspose transpose = tile::QuadTranspose::of_lane(lane & 3);
    weigh_tile<C>(
        block, first,
        [&](float& tile0, float& tile1) { weigh_scores<C>(block, params.scales, transpose, tile0, tile1); },
        [&] { return blocks::tf32::raise_reference<C>(block.scores, params.scales.exp2_scale, block.state); });
  }
}

}  // namespace dspattn::cuda::general
