// Weights and dS where nothing but a pattern, a diagonal, a window and lengths is asked for (Features::plain): straight
// code, in which loads and products of one block of rows overlap with the other's exponentials. What it
// computes is what scores.h does.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/general/backward/packed_choice.h"
#include "cuda/general/backward/scores.h"

namespace dspattn::cuda::general::backward {

// Scores become weights. A row that is undefined has NaN for its LSE, which makes NaN of all its weights, pruned ones
// too; but masked ones are 0. Few tiles are cut by a mask; what they need stands between long stretches of straight
// code.
template <typename C, int kBlocks>
__device__ __forceinline__ void weigh_plain(const BackwardParams& params, const ScoreItem& item, const TilePlace& place,
                                            Block<C> (&scores)[kBlocks]) {
  const auto mask = [&] {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      mask_band<C>(params.tiles, item.band, place.of_block(block), scores[block]);
    }
  };
  if (!place.interior) mask();
  constexpr int kPlaces = C::kTileK / 4;  // of a row
  PackedChoice<kPlaces> choice;
  static_assert(choice.kWords == kBlocks * kPlaces);
#pragma unroll
  for (int i = 0; i < choice.kWords; ++i) {
    const Block<C>& block = scores[i / kPlaces];
    choice.put(i, block[element_of(i % kPlaces, 0)], block[element_of(i % kPlaces, 1)]);
  }
  choice.choose(params, QuadExchange{});
  bool undefined = false;
  if (!place.interior) {
    choice.drop_masked();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) undefined = undefined || place.numbers_of(block).undefined();
  }
#pragma unroll
  for (int i = 0; i < choice.kWords; ++i) {
    Block<C>& block = scores[i / kPlaces];
    choice.get(i, block[element_of(i % kPlaces, 0)], block[element_of(i % kPlaces, 1)]);
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const OwnNumbers numbers = place.numbers_of(block);
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; ++i) {
      scores[block][i] = ptx::exp2_fast(fmaf(scores[block][i], params.scales.exp2_scale, -numbers.row[row_of(i)].lse));
    }
  }
  if (!undefined) return;
  mask();
#pragma unroll
  for (int i = 0; i < kBlocks * C::kTileK / 2; ++i) {
    float& weight = scores[i / (C::kTileK / 2)][i % (C::kTileK / 2)];
    weight = weight == -INFINITY ? 0.0f : weight;
  }
}

// As make_weights() of scores.h.
template <typename C, int kBlocks, typename TakeWeights>
__device__ __forceinline__ void make_plain_weights(const BackwardParams& params, const ScoreItem& item,
                                                   const TilePlace& place, Block<C> (&weights)[kBlocks],
                                                   Block<C> (&d_scores)[kBlocks], TakeWeights take_weights) {
  multiply_rows<C>(weights, place.q, place.keys);
  multiply_rows<C>(d_scores, place.d_out, place.values);  // beside the exponentials of other warps
  weigh_plain<C>(params, item, place, weights);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) take_weights(block, weights[block]);
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
