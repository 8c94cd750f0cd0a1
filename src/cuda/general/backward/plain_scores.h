// Weights and dS where nothing but a pattern of two, a diagonal, a window and lengths is asked for (Features::plain):
// straight code, in which loads and products of one block of rows overlap with the other's exponentials. What it
// computes is what scores.h does.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/general/backward/scores.h"

namespace dspattn::cuda::general::backward {

// Scores rounded and packed, two rows a word, and which of them are kept.
template <typename C, int kBlocks>
struct PackedScores {
  static constexpr int kWords = C::kTileK / 4;  // of 16 rows
  std::uint32_t words[kBlocks][kWords], kept[kBlocks][kWords];

  __device__ __forceinline__ PackedScores(const BackwardParams& params, const Block<C> (&scores)[kBlocks]) {
#pragma unroll
    for (int i = 0; i < kBlocks * kWords; ++i) {
      const Block<C>& block = scores[i / kWords];
      const int word = i % kWords;
      words[i / kWords][word] = ptx::pack_f16x2_clamped(block[element_of(word, 0)], block[element_of(word, 1)]);
      kept[i / kWords][word] = ~0u;
    }
    if (params.keep == 0) return;
    if (params.tiles.places_log2 == 2) {
      choose([](auto... four) { return tile::keep_two_of_four(four...); });
    } else {
      choose([](auto... four) { return tile::keep_one_of_two(four...); });
    }
  }
  template <typename Keep>
  __device__ __forceinline__ void choose(Keep keep) {
#pragma unroll
    for (int i = 0; i < kBlocks * kWords; i += 4) {
      const std::uint32_t* four = words[i / kWords] + i % kWords;
      const tile::KeptElements elements = tile::kept_elements(keep(four[0], four[1], four[2], four[3]));
#pragma unroll
      for (int e = 0; e < 4; ++e) kept[i / kWords][i % kWords + e] = elements.mask[e];
    }
  }
  __device__ __forceinline__ void drop_masked() {
#pragma unroll
    for (int i = 0; i < kBlocks * kWords; ++i) {
      kept[i / kWords][i % kWords] &= ~ptx::equal_f16x2(words[i / kWords][i % kWords], blocks::kLowestPair);
    }
  }
  // -inf where pruned or masked.
  __device__ __forceinline__ void unpack(Block<C> (&scores)[kBlocks]) const {
#pragma unroll
    for (int i = 0; i < kBlocks * kWords; ++i) {
      Block<C>& block = scores[i / kWords];
      const int word = i % kWords;
      ptx::unpack_f16x2(ptx::bit_select(kept[i / kWords][word], words[i / kWords][word], kNoScores),
                        block[element_of(word, 0)], block[element_of(word, 1)]);
    }
  }
};

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
  PackedScores<C, kBlocks> packed(params, scores);
  bool undefined = false;
  if (!place.interior) {
    packed.drop_masked();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) undefined = undefined || place.numbers_of(block).undefined();
  }
  packed.unpack(scores);
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
