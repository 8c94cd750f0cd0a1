// Weights and dS where nothing but a pattern of two, a diagonal, a window and lengths is asked for (Features::plain):
// straight code, in which loads and products of one block of rows overlap with the other's exponentials. What it
// computes is what scores.h does.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/general/backward/scores.h"

namespace dspattn::cuda::general::backward {

// Scores of 16 rows, rounded and packed; -inf where pruned or masked.
template <typename C>
__device__ __forceinline__ void select_plain(const BackwardParams& params, bool masked, Block<C>& scores) {
  constexpr int kWords = C::kTileK / 4;
  std::uint32_t words[kWords], kept[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = ptx::pack_f16x2_clamped(scores[element_of(i, 0)], scores[element_of(i, 1)]);
    kept[i] = ~0u;
  }
  const auto choose = [&](auto keep) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const tile::KeptElements elements = tile::kept_elements(keep(words[i], words[i + 1], words[i + 2], words[i + 3]));
#pragma unroll
      for (int e = 0; e < 4; ++e) kept[i + e] = elements.mask[e];
    }
  };
  if (params.keep != 0) {
    if (params.tiles.places_log2 == 2) {
      choose([](auto... four) { return tile::keep_two_of_four(four...); });
    } else {
      choose([](auto... four) { return tile::keep_one_of_two(four...); });
    }
  }
  if (masked) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) kept[i] &= ~ptx::equal_f16x2(words[i], blocks::kLowestPair);
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    ptx::unpack_f16x2(ptx::bit_select(kept[i], words[i], kNoScores), scores[element_of(i, 0)],
                      scores[element_of(i, 1)]);
  }
}

// As make_weights() of scores.h. A row that is undefined has NaN for its LSE, which makes NaN of all its weights,
// pruned ones too; but masked ones are 0.
template <typename C, int kBlocks, typename TakeWeights>
__device__ __forceinline__ void make_plain_weights(const BackwardParams& params, const ScoreItem& item,
                                                   const TilePlace& place, Block<C> (&weights)[kBlocks],
                                                   Block<C> (&d_scores)[kBlocks], TakeWeights take_weights) {
  multiply_rows<C>(weights, place.q, place.keys);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const OwnNumbers numbers = place.numbers_of(block);
    if (!place.interior) mask_band<C>(params.tiles, item.band, place.of_block(block), weights[block]);
    select_plain<C>(params, !place.interior, weights[block]);
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; ++i) {
      weights[block][i] =
          ptx::exp2_fast(fmaf(weights[block][i], params.scales.exp2_scale, -numbers.row[row_of(i)].lse));
    }
    if (!place.interior && numbers.undefined()) {
      mask_band<C>(params.tiles, item.band, place.of_block(block), weights[block]);
#pragma unroll
      for (float& weight : weights[block]) weight = weight == -INFINITY ? 0.0f : weight;
    }
    take_weights(block, weights[block]);
  }
  multiply_rows<C>(d_scores, place.d_out, place.values);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const OwnNumbers numbers = place.numbers_of(block);
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; ++i) {
      d_scores[block][i] = weights[block][i] * (d_scores[block][i] - numbers.row[row_of(i)].d);
    }
  }
}

}  // namespace dspattn::cuda::general::backward
