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
  template <typename Word>
  __device__ __forceinline__ Word operator()(Word word, int x) const {
    return __shfl_xor_sync(~0u, word, x);
  }
};

inline constexpr std::uint32_t kNoScores = 0xFC00FC00u;  // -inf twice: weights of 0, whatever the row's LSE

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
      const tile::KeptElements elements =
          tile::kept_elements(groups == 2 ? tile::keep_two_of_four(p[0], p[1], p[2], p[3])
                                          : tile::keep_one_of_two(p[0], p[1], p[2], p[3]));
#pragma unroll
      for (int e = 0; e < 4; ++e) kept[i + e] = elements.mask[e];
    }
  } else {
    std::uint32_t left[C::kTileK / 4];
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) left[i] = words[i];
    tile::keep_largest<tile::PackedKeys>(left, params.keep, groups, static_cast<int>(own_lane() & 3), QuadExchange{});
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
    tile::keep_largest<tile::SingleKeys>(left, params.keep, params.tiles.places_log2,
                                         static_cast<int>(own_lane() & 3), QuadExchange{});
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

// Of 16 rows: what an undefined row's scores, a soft cap and masks make of them. caps: the cap counts now; dP, in
// d_weights, is then multiplied by its slope, which the gradient of a bias does not see.
template <typename C>
__device__ __forceinline__ void change_scores(const BackwardParams& params, const ScoreItem& item, const ScorePlace& at,
                                              bool interior, const OwnNumbers& numbers, bool caps, Block<C>& scores,
                                              Block<C>& d_weights) {
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
  if (caps) {
    // biased() of masks.h multiplies by the unit.
    const float unit = C::kIsFp32 && params.bias.data != nullptr ? params.scales.score_unit : 1.0f;
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; ++i) {
      const float t = tanhf(scores[i] * unit / params.cap);
      scores[i] = params.cap / unit * t;
      if (params.target != Target::bias) d_weights[i] *= 1.0f - t * t;
    }
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
                                            Block<C> (&scores)[kBlocks], Block<C> (&d_weights)[kBlocks]) {
  const bool masked = !place.interior || params.bias.data != nullptr || params.allowed.data != nullptr;
  std::uint32_t kept[kBlocks] = {};
#pragma unroll 1
  for (int pass = params.cap != 0 ? 0 : 1; pass < 2; ++pass) {
    const bool caps = params.cap != 0 && pass == 1;
    multiply_rows<C>(scores, place.q, place.keys);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const OwnNumbers numbers = place.numbers_of(i);
      change_scores<C>(params, item, place.of_block(i), place.interior, numbers, caps, scores[i], d_weights[i]);
      if (!caps) {
        kept[i] = select<C>(params, masked, numbers.undefined(), scores[i]);
      } else {
#pragma unroll
        for (int e = 0; e < C::kTileK / 2; ++e) scores[i][e] = (kept[i] >> e & 1) != 0 ? scores[i][e] : -INFINITY;
      }
    }
  }
}

// Weights and dS of a warp's rows and a tile of keys; scores in place of weights where references are looked for.
template <typename C, int kBlocks>
__device__ __forceinline__ void make_weights(const BackwardParams& params, const ScoreItem& item,
                                             const TilePlace& place, Block<C> (&weights)[kBlocks],
                                             Block<C> (&d_scores)[kBlocks]) {
  multiply_rows<C>(d_scores, place.d_out, place.values);
  std::uint32_t dropped[kBlocks] = {};
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const OwnNumbers own = place.numbers_of(block);
    if (params.dropping.threshold != 0) {
      dropped[block] = dropped_elements<C>(params, own, place.of_block(block));
#pragma unroll
      for (int i = 0; i < C::kTileK / 2; ++i) {
        float& x = d_scores[block][i];
        x = (dropped[block] >> i & 1) != 0 ? 0.0f : x * params.dropping.factor;
      }
    }
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; ++i) d_scores[block][i] -= own.row[row_of(i)].d;
  }
  make_scores<C>(params, item, place, weights, d_scores);
  if (C::kIsFp32 && params.target == Target::references) return;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const OwnNumbers own = place.numbers_of(block);
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; ++i) {
      const RowNumbers& row = own.row[row_of(i)];
      // Undefined rows have NaN for scores.
      const float lse = std::isnan(row.lse) ? 0.0f : row.lse;
      const float score = C::kIsFp32 ? weights[block][i] - row.reference : weights[block][i];
      const float weight = ptx::exp2_fast(fmaf(score, params.scales.exp2_scale, -lse));
      d_scores[block][i] *= weight;
      weights[block][i] = weight;
    }
    if (params.dropping.threshold != 0) {
#pragma unroll
      for (int i = 0; i < C::kTileK / 2; ++i) {
        weights[block][i] *= (dropped[block] >> i & 1) != 0 ? 0.0f : params.dropping.factor;  // NaN stays NaN
      }
    }
  }
}

}  // namespace dspattn::cuda::general::backward
