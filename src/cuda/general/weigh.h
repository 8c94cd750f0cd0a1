// From a tile's scores to weights: selected, exponentiated relative to a reference, packed for the output product.
//
// 16-bit inputs: scores are rounded to packed fp16, the contract's selection key, first; it is also what exponentials
// are taken of. A tile is weighed relative to the reference there is; only where that turns out too small, or there is
// none yet, to one raised to the tile's largest scores. fp32: the tile's largest score is looked at first.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/scores16.h"
#include "cuda/blocks/scores32.h"
#include "cuda/blocks/weigh16.h"
#include "cuda/general/params.h"
#include "cuda/general/products.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/tile/select_any.h"

namespace dspattn::cuda::general {

// A word of another lane of the quad.
struct Exchange {
  template <typename Word>
  __device__ __forceinline__ Word operator()(Word word, int x) const {
    return __shfl_xor_sync(~0u, word, x);
  }
};

// The scores of 16 rows x kTileK keys, rounded and packed, two rows a word: element e of group block m of `fours`, or
// place 4m + e.
template <typename C>
struct PackedTile {
  std::uint32_t words[C::kTileK / 4];

  __device__ __forceinline__ explicit PackedTile(const float (&scores)[C::kTileK / 2]) {
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) {
      const int at = C::kKind == Kind::fours ? blocks::score_index<C>(i / 4, i % 4) : 4 * (i >> 1) + (i & 1);
      words[i] = ptx::pack_f16x2_clamped(scores[at], scores[at + 2]);
    }
  }
  __device__ __forceinline__ std::uint32_t word(int m, int e) const { return words[4 * m + e]; }
};

// Masks all but the `keep` largest scores of each group.
template <typename C>
__device__ __forceinline__ void prune(PackedTile<C>& packed, int keep, int places_log2, int t) {
  std::uint32_t left[C::kTileK / 4];
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) left[i] = packed.words[i];
  tile::keep_largest<tile::PackedKeys>(left, keep, places_log2, t, Exchange{});
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) {
    packed.words[i] = ptx::bit_select(tile::is_kept<tile::PackedKeys>(left[i]), packed.words[i], blocks::kLowestPair);
  }
}
template <typename C>
__device__ __forceinline__ void prune(float (&scores)[C::kTileK / 2], int keep, int places_log2, int t) {
#pragma unroll
  for (int row = 0; row < 4; row += 2) {
    float left[C::kTileK / 4];
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) left[i] = scores[4 * (i >> 1) + (i & 1) + row];
    tile::keep_largest<tile::SingleKeys>(left, keep, places_log2, t, Exchange{});
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) {
      if (tile::is_kept<tile::SingleKeys>(left[i]) == 0) scores[4 * (i >> 1) + (i & 1) + row] = -INFINITY;
    }
  }
}

// Sums of a tile's weights of a lane's two rows, unrounded.
struct TileSums {
  float row0 = 0, row1 = 0;
};

// Sparse weights and their metadata. S: the configuration with a selection.
template <typename S, typename C>
__device__ __forceinline__ TileSums weigh_fours(const PackedTile<C>& packed, RowBlock<C>& block,
                                                const ScoreScales& scales, int lane) {
  blocks::Weigher<S> weigher(scales, lane);
  weigher.state = block.state;
  weigher.weigh(packed, block, [] {});
  return {weigher.tile0, weigher.tile1};
}

// Weights of all scores in the order of a dense A operand.
template <typename C>
__device__ __forceinline__ TileSums weigh_all(const PackedTile<C>& packed, RowBlock<C>& block,
                                              const ScoreScales& scales) {
  const auto exponents = blocks::Exponents::of<C>(scales, block.state);
  TileSums sums;
#pragma unroll
  for (int i = 0; i < C::kTileK / 8; ++i) {
    float weight[4];
    exponents.weigh(packed.words[2 * i], packed.words[2 * i + 1], weight);
    sums.row0 += weight[0] + weight[1];
    sums.row1 += weight[2] + weight[3];
    const auto pack = [](float a, float b) {
      return C::kType == DType::bf16 ? ptx::pack_bf16x2(a, b) : ptx::pack_f16x2(a, b);
    };
    block.weights[2 * i] = pack(weight[0], weight[1]);
    block.weights[2 * i + 1] = pack(weight[2], weight[3]);
  }
  return sums;
}

// 16 rows of 16-bit inputs. `first`: their first tile.
template <typename C>
__device__ __forceinline__ void weigh_rows(const ForwardParams& params, PackedTile<C>& packed, RowBlock<C>& block,
                                           int lane, bool first) {
  if constexpr (C::kKind == Kind::any) {
    if (params.keep != 0) prune<C>(packed, params.keep, params.tiles.places_log2, lane & 3);
  }
  bool raises = first;
  TileSums sums;
#pragma unroll 1
  for (;;) {
    blocks::Raised raised{1, 1, false, false};
    if (raises) {
      raised = blocks::raise_reference<C>(packed, params.scales, block.state);
      blocks::shrink(raised, block.state, block.out);
    }
    if constexpr (C::kKind == Kind::any) {
      sums = weigh_all<C>(packed, block, params.scales);
    } else if (params.one_of_two != 0) {
      sums = weigh_fours<Selecting<C, Selection::one_of_two>>(packed, block, params.scales, lane);
    } else {
      sums = weigh_fours<Selecting<C, Selection::two_of_four>>(packed, block, params.scales, lane);
    }
    if (raises) blocks::forget_unset(raised, block.state);
    // False also for NaN: a row without a reference.
    if (raises || __all_sync(~0u, sums.row0 < C::kWeightLimit && sums.row1 < C::kWeightLimit) != 0) break;
    raises = true;
  }
  block.state.sum0 += sums.row0;
  block.state.sum1 += sums.row1;
}

// fp32: weights of all scores in the order of a dense A operand, and their sums, unrounded, added to the state's. kFar:
// see blocks/scores32.h. tf32: half a unit is added because the tensor core drops the bits below.
template <typename C, bool kFar>
__device__ __forceinline__ void weigh_all(RowBlock<C>& block, float scale) {
  const float minus0 = block.state.minus0 * scale;
  const float minus1 = block.state.minus1 * scale;
  constexpr std::uint32_t kHalfUnit = C::kIsTf32 ? 0x1000 : 0;
  // A tf32 A operand: rows g and g + 8 of column 2t, then of 2t + 1; without tensor cores as the scores are.
  constexpr int kSecond = C::kIsTf32 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < C::kTileK / 8; ++i) {
    float weight[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float score = block.scores[4 * i + j];
      const float reference = j < 2 ? block.state.minus0 : block.state.minus1;
      weight[j] = ptx::exp2_fast(kFar ? (score + reference) * scale : fmaf(score, scale, j < 2 ? minus0 : minus1));
    }
    block.state.sum0 += weight[0] + weight[1];
    block.state.sum1 += weight[2] + weight[3];
    block.weights[4 * i] = __float_as_uint(weight[0]) + kHalfUnit;
    block.weights[4 * i + kSecond] = __float_as_uint(weight[1]) + kHalfUnit;
    block.weights[4 * i + 3 - kSecond] = __float_as_uint(weight[2]) + kHalfUnit;
    block.weights[4 * i + 3] = __float_as_uint(weight[3]) + kHalfUnit;
  }
}

// 16 rows of fp32 inputs.
template <typename C>
__device__ __forceinline__ void weigh_rows(const ForwardParams& params, RowBlock<C>& block, int lane) {
  if constexpr (C::kKind != Kind::pairs) {
    if (params.keep != 0) prune<C>(block.scores, params.keep, params.tiles.places_log2, lane & 3);
  }
  const float scale = params.scales.exp2_scale;
  const blocks::tf32::MinusTops tops = blocks::tf32::minus_tops<C>(block.scores);
  const auto fits = [scale](float minus, float minus_top) {
    // A tile without a visible key asks for nothing of a row that has a reference.
    return !std::isnan(minus) && (std::isnan(minus_top) || (minus - minus_top) * scale <= C::kLargestWeightLog2);
  };
  blocks::Raised raised{1, 1, false, false};
  const bool raises = __all_sync(~0u, fits(block.state.minus0, tops.row0) && fits(block.state.minus1, tops.row1)) == 0;
  if (raises) {
    raised = blocks::raise_references(tops.row0, tops.row1, block.state, scale);
    blocks::shrink(raised, block.state, block.out);
  }
  const float largest = fmaxf(fabsf(block.state.minus0), fabsf(block.state.minus1)) * scale;
  const bool near = __all_sync(~0u, !(largest > blocks::tf32::kLargestNearReference)) != 0;
  const auto weigh = [&]<bool kFar>() {
    if constexpr (C::kKind == Kind::pairs) {
      blocks::tf32::weigh_tile<C, kFar>(block.scores, tile::QuadTranspose::of_lane(lane & 3), scale, block.state,
                                        block.weights, block.metadata, block.state.sum0, block.state.sum1);
    } else {
      weigh_all<C, kFar>(block, scale);
    }
  };
  if (near) {
    weigh.template operator()<false>();
  } else {
    weigh.template operator()<true>();
  }
  if (raises) blocks::forget_unset(raised, block.state);
}

}  // namespace dspattn::cuda::general
