// From a tile's products to what gradients are made of: scores masked and selected as the forward does it, bit for bit,
// then weights and dS.
//
//   dP    = factor * dO.V - D          factor: dropout's
//   P     = 2^(score - LSE)            of kept scores, 0 elsewhere
//   dS    = P * dP                     and times the slope of a soft cap, but for the gradient of a bias
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dropout.h"
#include "cuda/blocks/scores16.h"
#include "cuda/general/backward/packed_choice.h"
#include "cuda/general/backward/params.h"
#include "cuda/general/backward/products.h"
#include "cuda/general/masks.h"
#include "cuda/tile/kept_elements.h"
#include "cuda/tile/select_any.h"

namespace dspattn::cuda::general::backward {

// Whose scores: rows of a sequence and a head.
struct ScoreItem {
  int rows, sequence, head;
  tile::RowBand band;
};

// A lane's two rows of 16: g and g + 8.
struct OwnNumbers {
  RowNumbers row[2];

  __device__ __forceinline__ static OwnNumbers load(std::uint32_t numbers) {
    OwnNumbers own;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x = ptx::load_shared_16(numbers + ((own_lane() >> 2) + 8 * i) * 16);
      own.row[i] = {x.x, x.y, x.z, __float_as_uint(x.w)};
    }
    return own;
  }
  // Some row of the warp's is.
  __device__ __forceinline__ bool undefined() const {
    return __all_sync(~0u, !std::isnan(row[0].lse) && !std::isnan(row[1].lse)) == 0;
  }
};

// The row (0: g, 1: g + 8) and the lane's place, 0 to 7, of element i of a Block.
__device__ __forceinline__ constexpr int row_of(int i) { return i >> 1 & 1; }
__device__ __forceinline__ constexpr int place_of(int i) { return 2 * (i >> 2) + (i & 1); }
// And back.
__device__ __forceinline__ constexpr int element_of(int place, int row) {
  return 4 * (place >> 1) + (place & 1) + 2 * row;
}

// A word of another lane of the quad.
struct QuadExchange {
  __device__ __forceinline__ static int own() { return static_cast<int>(own_lane() & 3); }
  template <typename Word>
  __device__ __forceinline__ Word operator()(Word word, int x) const {
    return __shfl_xor_sync(~0u, word, x);
  }
};

// 16-bit inputs: the scores rounded to fp16, the contract's selection key, two rows a word; -inf where pruned or
// masked. masked: there may be masked scores. undefined: some rows are NaN, which are all kept.
template <typename C>
__device__ __forceinline__ void select_packed(const BackwardParams& params, const Block<C>& scores, bool masked,
                                              bool undefined, std::uint32_t (&words)[C::kTileK / 4]) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) {
    words[i] = ptx::pack_f16x2_clamped(scores[element_of(i, 0)], scores[element_of(i, 1)]);
  }
  const int groups = params.tiles.places_log2;
  std::uint32_t kept[C::kTileK / 4];
  if (params.keep == 0) {
#pragma unroll
    for (std::uint32_t& word : kept) word = ~0u;
  } else if (!undefined && ((groups == 2 && params.keep == 2 && params.tiles.group == 4) || groups == 1)) {
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; i += 4) {
      const std::uint32_t* p = words + i;
      const tile::KeptElements elements = tile::kept_elements(
          groups == 2 ? tile::keep_two_of_four(p[0], p[1], p[2], p[3]) : tile::keep_one_of_two(p[0], p[1], p[2], p[3]));
#pragma unroll
      for (int e = 0; e < 4; ++e) kept[i + e] = elements.mask[e];
    }
  } else {
    std::uint32_t left[C::kTileK / 4];
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) left[i] = words[i];
    tile::keep_largest<tile::PackedKeys>(left, params.keep, groups, QuadExchange::own(), QuadExchange{});
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) kept[i] = tile::is_kept<tile::PackedKeys>(left[i]);
  }
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) {
    const std::uint32_t seen = masked ? ~ptx::equal_f16x2(words[i], blocks::kLowestPair) : ~0u;
    words[i] = ptx::bit_select(kept[i] & seen, words[i], kNoScores);
  }
}

// fp32 inputs: bit i of the result: element i is kept.
template <typename C>
__device__ __forceinline__ std::uint32_t select_single(const BackwardParams& params, const Block<C>& scores) {
  if (params.keep == 0) return ~0u;
  std::uint32_t kept = 0;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float left[C::kTileK / 4];
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) left[i] = scores[element_of(i, row)];
    tile::keep_largest<tile::SingleKeys>(left, params.keep, params.tiles.places_log2, static_cast<int>(own_lane() & 3),
                                         QuadExchange{});
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) {
      if (tile::is_kept<tile::SingleKeys>(left[i]) != 0) kept |= 1u << element_of(i, row);
    }
  }
  return kept;
}

// What of a row's weights dropout drops: bit i, element i.
template <typename C>
__device__ __forceinline__ std::uint32_t dropped_elements(const BackwardParams& params, const OwnNumbers& numbers,
                                                          const ScorePlace& at) {
  std::uint32_t dropped = 0;
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) {
    const int column = 8 * (i >> 1) + 2 * at.t + (i & 1);
    const int key = at.first_key + tile::key_of_column<C::kLayout, C::kTileK>(params.tiles, at.part, column);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const core::DropoutRow random{numbers.row[row].dropout};
      if (random.bits(static_cast<std::uint32_t>(key)) < params.dropping.threshold) dropped |= 1u << element_of(i, row);
    }
  }
  return dropped;
}

// The slopes of a soft cap at a Block's scores, of 16-bit inputs in fp16.
template <typename C>
struct Slopes {
  static constexpr int kStep = C::kIsFp32 ? 2 : 1;  // words of two elements
  std::uint32_t words[C::kTileK / 4 * kStep];

  // scores, which are to be multiplied by `unit` first, become capped ones. `rounds`: 16-bit inputs without a bias,
  // whose scores the forward has rounded before.
  __device__ __forceinline__ void cap(float cap, float unit, bool rounds, Block<C>& scores) {
#pragma unroll 1
    for (int i = 0; i < C::kTileK / 2; i += 2) {
      float slope[2];
      if (!C::kIsFp32 && rounds) {
        ptx::unpack_f16x2(ptx::pack_f16x2_clamped(scores[0], scores[1]), scores[0], scores[1]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float t = tanhf(scores[e] * unit / cap);
        scores[e] = cap / unit * t;
        slope[e] = fmaxf(1.0f - t * t, 0.0f);  // 0 of an undefined score: its weight says where that counts
      }
      if constexpr (C::kIsFp32) {
        words[0] = __float_as_uint(slope[0]);
        words[1] = __float_as_uint(slope[1]);
      } else {
        words[0] = ptx::pack_f16x2(slope[0], slope[1]);
      }
      go_round<2>(scores);
      go_round<kStep>(words);
    }
  }
  __device__ __forceinline__ void multiply(Block<C>& values) const {
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; i += 2) {
      float slope[2];
      if constexpr (C::kIsFp32) {
        slope[0] = __uint_as_float(words[i]);
        slope[1] = __uint_as_float(words[i + 1]);
      } else {
        ptx::unpack_f16x2(words[i / 2], slope[0], slope[1]);
      }
      values[i] *= slope[0];
      values[i + 1] *= slope[1];
    }
  }
};

// Of 16 rows: what an undefined row's scores, a soft cap (`caps`: it counts now) and masks make of them.
template <typename C>
__device__ __forceinline__ void change_scores(const BackwardParams& params, const ScoreItem& item, const ScorePlace& at,
                                              bool interior, const OwnNumbers& numbers, bool caps, Block<C>& scores,
                                              Slopes<C>& slopes) {
  if (!C::kIsFp32 && params.score_scale != 1.0f) {
#pragma unroll
    for (float& score : scores) score *= params.score_scale;
  }
  if (numbers.undefined()) {  // all keys that such a row sees are to have undefined gradients
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; ++i) {
      if (std::isnan(numbers.row[row_of(i)].lse)) scores[i] = NAN;
    }
  }
  // biased() of masks.h multiplies by the unit.
  if (caps) {
    const bool biased = params.bias.data != nullptr;
    slopes.cap(params.cap, C::kIsFp32 && biased ? params.scales.score_unit : 1.0f, !biased, scores);
  }
  if (params.bias.data != nullptr || params.allowed.data != nullptr) mask_by_tensors<C>(params, item, at, scores);
  if (!interior) mask_band<C>(params.tiles, item.band, at, scores);
}

// Scores become those that weights are of: of kept keys, -inf elsewhere. Returns bit i: element i is kept.
template <typename C>
__device__ __forceinline__ std::uint32_t select(const BackwardParams& params, bool masked, bool undefined,
                                                Block<C>& scores) {
  std::uint32_t kept = 0;
  if constexpr (C::kIsFp32) {
    kept = select_single<C>(params, scores);
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; ++i) scores[i] = (kept >> i & 1) != 0 ? scores[i] : -INFINITY;
  } else {
    std::uint32_t words[C::kTileK / 4];
    select_packed<C>(params, scores, masked, undefined, words);
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) {
      ptx::unpack_f16x2(words[i], scores[element_of(i, 0)], scores[element_of(i, 1)]);
    }
    if (params.cap != 0) {
#pragma unroll
      for (int i = 0; i < C::kTileK / 2; ++i) kept |= scores[i] != -INFINITY ? 1u << i : 0u;
    }
  }
  return kept;
}

// 16-bit inputs: scores as the forward rounds them before it takes exponentials.
template <typename C>
__device__ __forceinline__ void round_scores(Block<C>& scores) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 2; i += 2) {
    ptx::unpack_f16x2(ptx::pack_f16x2_clamped(scores[i], scores[i + 1]), scores[i], scores[i + 1]);
  }
}

// Where a warp's rows and a tile of keys meet.
struct TilePlace {
  std::uint32_t q, d_out, numbers;  // in shared memory, of the warp's first row
  std::uint32_t keys, values;
  int first_row;  // the warp's, of the sequence
  int first_key, part;
  bool interior;  // no row of the query tile misses a key

  __device__ __forceinline__ ScorePlace of_block(int block) const {
    return {first_row + 16 * block + static_cast<int>(own_lane() >> 2), first_key, part,
            static_cast<int>(own_lane() & 3)};
  }
  __device__ __forceinline__ OwnNumbers numbers_of(int block) const {
    return OwnNumbers::load(numbers + static_cast<std::uint32_t>(block * 16 * sizeof(RowNumbers)));
  }
};

// Scores that weights are of. With a soft cap, by which keys are not chosen, they are computed twice: registers are too
// few for both.
template <typename C, int kBlocks>
__device__ __forceinline__ void make_scores(const BackwardParams& params, const ScoreItem& item, const TilePlace& place,
                                            Block<C> (&scores)[kBlocks], Slopes<C> (&slopes)[kBlocks]) {
  const bool masked = !place.interior || params.bias.data != nullptr || params.allowed.data != nullptr;
  std::uint32_t kept[kBlocks] = {};
#pragma unroll 1
  for (int pass = params.cap != 0 ? 0 : 1; pass < 2; ++pass) {
    const bool caps = params.cap != 0 && pass == 1;
    multiply_rows<C>(scores, place.q, place.keys);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const OwnNumbers numbers = place.numbers_of(i);
      change_scores<C>(params, item, place.of_block(i), place.interior, numbers, caps, scores[i], slopes[i]);
      if (!caps) {
        kept[i] = select<C>(params, masked, numbers.undefined(), scores[i]);
      } else {
        if constexpr (!C::kIsFp32) round_scores<C>(scores[i]);
#pragma unroll
        for (int e = 0; e < C::kTileK / 2; ++e) scores[i][e] = (kept[i] >> e & 1) != 0 ? scores[i][e] : -INFINITY;
      }
      if (params.bias.data != nullptr && pass == 1) {
        // Only then a row may have a reference.
        const OwnNumbers again = place.numbers_of(i);
#pragma unroll
        for (int e = 0; e < C::kTileK / 2; ++e) scores[i][e] -= again.row[row_of(e)].reference;
      }
    }
  }
}

// Scores of 16 rows become weights.
template <typename C>
__device__ __forceinline__ void weigh(const BackwardParams& params, const OwnNumbers& numbers, Block<C>& scores) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 2; ++i) {
    const RowNumbers& row = numbers.row[row_of(i)];
    // Undefined rows have NaN for scores.
    const float lse = std::isnan(row.lse) ? 0.0f : row.lse;
    scores[i] = ptx::exp2_fast(fmaf(scores[i], params.scales.exp2_scale, -lse));
  }
}

// What dropout makes of weights: those of `dropped` are 0, the others larger. NaN stays NaN.
template <typename C>
__device__ __forceinline__ void drop(const BackwardParams& params, std::uint32_t dropped, Block<C>& weights) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 2; ++i) weights[i] *= (dropped >> i & 1) != 0 ? 0.0f : params.dropping.factor;
}

// dP of 16 rows and weights, with the cap's slope, become dS.
template <typename C>
__device__ __forceinline__ void finish_d_scores(const BackwardParams& params, const OwnNumbers& numbers,
                                                std::uint32_t dropped, const Block<C>& weights, Block<C>& d_scores) {
  if (params.dropping.threshold != 0) {
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; ++i) {
      d_scores[i] = (dropped >> i & 1) != 0 ? 0.0f : d_scores[i] * params.dropping.factor;
    }
  }
#pragma unroll
  for (int i = 0; i < C::kTileK / 2; ++i) d_scores[i] = weights[i] * (d_scores[i] - numbers.row[row_of(i)].d);
}

// Weights and dS of a warp's rows and a tile of keys; take_weights(block, weights) is given the weights as dropout
// leaves them.
template <typename C, int kBlocks, typename TakeWeights>
__device__ __forceinline__ void make_weights(const BackwardParams& params, const ScoreItem& item,
                                             const TilePlace& place, Block<C> (&weights)[kBlocks],
                                             Block<C> (&d_scores)[kBlocks], TakeWeights take_weights) {
  Slopes<C> slopes[kBlocks];
  make_scores<C>(params, item, place, weights, slopes);
  std::uint32_t dropped[kBlocks] = {};
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const OwnNumbers numbers = place.numbers_of(block);
    weigh<C>(params, numbers, weights[block]);
    if (params.dropping.threshold != 0) {
      dropped[block] = dropped_elements<C>(params, numbers, place.of_block(block));
      Block<C> left;
#pragma unroll
      for (int i = 0; i < C::kTileK / 2; ++i) left[i] = weights[block][i];
      drop<C>(params, dropped[block], left);
      take_weights(block, left);
    } else {
      take_weights(block, weights[block]);
    }
    if (params.cap != 0 && params.target != Target::bias) slopes[block].multiply(weights[block]);
  }
  multiply_rows<C>(d_scores, place.d_out, place.values);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    finish_d_scores<C>(params, place.numbers_of(block), dropped[block], weights[block], d_scores[block]);
  }
}

}  // namespace dspattn::cuda::general::backward
