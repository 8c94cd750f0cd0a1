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
#include "cuda/blocks/sink.h"
#include "cuda/blocks/weigh16.h"
#include "cuda/general/extras.h"
#include "cuda/general/item.h"
#include "cuda/general/params.h"
#include "cuda/general/products.h"
#include "cuda/general/shared_choice.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/tile/select_any.h"

namespace dspattn::cuda::general {

// A tile of which rows. `pass`: 0 where its scores are weighed; the passes before count down to it.
template <typename C>
struct TilePlace {
  const ForwardParams& params;
  ItemOf<C>& item;
  int tile;
  int bare;  // kKeepsAddresses: 1: its scores are compared as the product leaves them
  int pass = 0;
};

// `fours`: scores of a part of a tile's columns of which the band hides some, whatever the pattern.
template <typename C>
struct PartOf : Selecting<C, Selection::two_of_four> {
  static constexpr int kTileK = C::kPartColumns;
};
template <typename C>
using BandedScores = blocks::PackedScores<PartOf<C>, blocks::Hidden::anything>;

// The scores of 16 rows x kTileK keys, rounded and packed, two rows a word: element e of group block m of `fours`, or
// place 4m + e.
template <typename C>
struct PackedTile {
  std::uint32_t words[C::kTileK / 4];

  // Calls take(word, score) for every word of part `part` of the columns, and its score of row g; that of row g + 8 is
  // two further.
  template <typename Take>
  __device__ __forceinline__ void each_word(int part, const float (&scores)[C::kPartColumns / 2], Take take) {
    const int first = part * (C::kPartColumns / 2);
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) {
      const int at = C::kKind == Kind::fours ? blocks::score_index<C>(i / 4, i % 4) : 4 * (i >> 1) + (i & 1);
      if (at >= first && at < first + C::kPartColumns / 2) take(i, scores + (at - first));
    }
  }
  __device__ __forceinline__ void pack(int part, const float (&scores)[C::kPartColumns / 2]) {
    each_word(part, scores, [&](int i, const float* score) { words[i] = ptx::pack_f16x2_clamped(score[0], score[2]); });
  }
  // `fours`: without what the band hides.
  __device__ __forceinline__ void pack_seen(int part, const BandedScores<C>& banded) {
    each_word(part, banded.scores, [&](int i, const float* score) {
      words[i] =
          ptx::bit_select(banded.seen(i / 4, i % 4), ptx::pack_f16x2_clamped(score[0], score[2]), blocks::kLowestPair);
    });
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
// Two of four, from the second largest. False where a third is as large, in any of the warp's groups: then nothing is
// done.
template <typename C>
__device__ __forceinline__ bool prune_to_two(float (&scores)[C::kTileK / 2]) {
  constexpr int kGroups = C::kTileK / 8;  // two neighbouring blocks' scores of one row
  const auto first = [](int group) { return 8 * (group >> 1) + 2 * (group & 1); };
  float second[kGroups];
  bool ties = false;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const float* s = scores + first(i);
    const float middle0 = fminf(fmaxf(s[0], s[1]), fmaxf(s[4], s[5]));
    const float middle1 = fmaxf(fminf(s[0], s[1]), fminf(s[4], s[5]));
    second[i] = fmaxf(middle0, middle1);
    ties = ties || (middle0 == middle1 && middle0 != -INFINITY);
  }
  if (__all_sync(~0u, !ties) == 0) return false;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    float* s = scores + first(i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& score = s[4 * (j >> 1) + (j & 1)];
      score = score < second[i] ? -INFINITY : score;  // not NaN
    }
  }
  return true;
}
template <typename C>
__device__ __forceinline__ void prune(float (&scores)[C::kTileK / 2], int keep, int places_log2, int t) {
  if (keep == 2 && places_log2 == 2 && prune_to_two<C>(scores)) return;
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

// Weights of two keys of either row: counted, and packed as registers 2i and 2i + 1 of a dense A operand.
template <typename C>
__device__ __forceinline__ void take_weights(const float (&weight)[4], int i, RowBlock<C>& block, TileSums& sums) {
  sums.row0 += weight[0] + weight[1];
  sums.row1 += weight[2] + weight[3];
  const auto pack = [](float a, float b) {
    return C::kType == DType::bf16 ? ptx::pack_bf16x2(a, b) : ptx::pack_f16x2(a, b);
  };
  block.weights[2 * i] = pack(weight[0], weight[1]);
  block.weights[2 * i + 1] = pack(weight[2], weight[3]);
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
    take_weights<C>(weight, i, block, sums);
  }
  return sums;
}

// Which places are kept of a tile whose scores are as they are compared.
template <typename C, typename Scores>
__device__ __forceinline__ std::uint32_t choose_places(const TilePlace<C>& at, const OwnRows& own, const Scores& scores,
                                                       int lane) {
  const ForwardParams& params = at.params;
  if (params.keep == 0) return kAllPlaces;
  const bool together = params.extras.shared_totals.data != nullptr;
  if (at.item.group.parts() > 1) {  // of all rows alike, once the last part is counted
    const Shares<C, Scores> shares(params, at.item, own, scores);
    const std::uint32_t kept =
        kept_by_rows<C, 1>(params, lane & 3, [&](int, float(&left)[C::kTileK / 4]) { shares.add_part(at.item, left); });
    return kept | kept << 16;
  }
  if constexpr (C::kIsFp32) {
    const Shares<C, Scores> shares(params, at.item, own, scores);
    const std::uint32_t kept = kept_by_rows<C>(params, lane & 3, [&](int row, float(&left)[C::kTileK / 4]) {
      if (together) return shares(row, left);
#pragma unroll
      for (int i = 0; i < C::kTileK / 4; ++i) left[i] = score_at<C>(scores, i, row);
    });
    return together ? kept | shares.shown() : kept;
  } else {
    if (!together) return kept_places<C>(params, scores, lane & 3);
    const Shares<C, Scores> shares(params, at.item, own, scores);
    return kept_by_rows<C>(params, lane & 3, shares) | shares.shown();
  }
}

// Before a tile is weighed: masks what is not kept, where its weights do not count, and caps scores. Returns what is
// kept. Passes that choose only write it down.
template <typename C, typename Scores>
__device__ __forceinline__ std::uint32_t prepare(const TilePlace<C>& at, Scores& scores, int lane) {
  const Extras& extras = at.params.extras;
  std::uint32_t kept;
  const OwnRows own = own_rows(at.item, own_row<C>());
  if (extras.choosing_passes == 0 || at.pass > 0) {
    kept = choose_places<C>(at, own, scores, lane);
    if (at.pass > 0) {
      at.item.kept[own_thread()] = kept;
      return kept;
    }
  } else {
    kept = at.item.kept[own_thread()];
    if (at.item.group.parts() > 1) kept |= Shares<C, Scores>(at.params, at.item, own, scores).shown();
  }
  if (extras.cap != 0 && extras.cap_before_bias == 0) cap_scores<C>(extras.cap, scores);
  if (extras.means.data == nullptr) take_places<C>(scores, kept);
  return kept;
}

// Weights that count without meeting V, taken once the reference stands: those of pruned keys (rest = mean), which also
// wait in shared memory for the mean of V, or with dropout those of all kept keys. Masks what then does not meet V.
template <typename C, typename Scores>
__device__ __forceinline__ void count_apart(const TilePlace<C>& at, std::uint32_t kept, Scores& scores,
                                            const blocks::Raised& raised, RowBlock<C>& block) {
  const ForwardParams& params = at.params;
  const bool drops = params.extras.drop_below != 0;
  const PlaceSums counted = sum_places<C>(params.scales, block.state, scores, drops ? kept : ~kept);
  block.state.sum0 += counted.row0;
  block.state.sum1 += counted.row1;
  if (drops) {
    const OwnRows own = own_rows(at.item, own_row<C>());
    kept &= undropped_places<C>(params, at.item.sequence, own, params.tiles.first_key(at.tile),
                                params.tiles.part(at.tile), own_thread() & 3);
  } else {
    blocks::RowState of_quad = block.state;
    of_quad.sum0 = counted.row0;
    of_quad.sum1 = counted.row1;
    const blocks::RowSums sums = blocks::sum_up(of_quad);
    if ((own_thread() & 3) == 0) {
      float* to = at.item.rest + own_row<C>();
      to[0] = to[0] * raised.shrink0 + sums.sum0;
      to[8] = to[8] * raised.shrink1 + sums.sum1;
    }
  }
  take_places<C>(scores, kept);
}

// Weights of 16 rows relative to their references. S: the configuration with a selection, where the products have one.
template <typename S, typename C>
__device__ __forceinline__ TileSums weigh_block(const ScoreScales& scales, const PackedTile<C>& packed,
                                                RowBlock<C>& block, int lane) {
  if constexpr (C::kKind == Kind::any) {
    return weigh_all<C>(packed, block, scales);
  } else {
    return weigh_fours<S>(packed, block, scales, lane);
  }
}
// The same of a warp's rows.
template <typename S, typename C>
__device__ __forceinline__ void weigh_blocks(const ScoreScales& scales, const PackedTile<C> (&packed)[C::kRowBlocks],
                                             RowBlock<C> (&rows)[C::kRowBlocks], TileSums (&sums)[C::kRowBlocks],
                                             int lane) {
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) sums[i] = weigh_block<S, C>(scales, packed[i], rows[i], lane);
}

// Whether a tile's weights are small enough; not for NaN: a row without a reference.
template <typename C>
__device__ __forceinline__ bool sums_fit(const TileSums (&sums)[C::kRowBlocks]) {
  bool fits = true;
#pragma unroll
  for (const TileSums& sum : sums) fits = fits && sum.row0 < C::kWeightLimit && sum.row1 < C::kWeightLimit;
  return __all_sync(~0u, fits) != 0;
}
template <typename C>
__device__ __forceinline__ void add_sums(const TileSums (&sums)[C::kRowBlocks], RowBlock<C> (&rows)[C::kRowBlocks]) {
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) {
    rows[i].state.sum0 += sums[i].row0;
    rows[i].state.sum1 += sums[i].row1;
  }
}

// Raises the references to the tile's largest scores, then weighs it.
template <typename S, typename C>
__device__ __forceinline__ void weigh_raised(const ScoreScales& scales, const PackedTile<C> (&packed)[C::kRowBlocks],
                                             RowBlock<C> (&rows)[C::kRowBlocks], TileSums (&sums)[C::kRowBlocks],
                                             int lane) {
  blocks::Raised raised[C::kRowBlocks];
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) {
    raised[i] = blocks::raise_reference<C>(packed[i], scales, rows[i].state);
    blocks::shrink(raised[i], rows[i].state, rows[i].out);
  }
  weigh_blocks<S, C>(scales, packed, rows, sums, lane);
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) blocks::forget_unset(raised[i], rows[i].state);
}

// Weights of scores that nothing is selected of, from fp32 scores: in the order of a dense A operand.
template <typename C>
__device__ __forceinline__ TileSums weigh_unselected(RowBlock<C>& block, float scale) {
  TileSums sums;
#pragma unroll
  for (int i = 0; i < C::kTileK / 8; ++i) {
    float weight[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      weight[j] = ptx::exp2_fast(fmaf(block.scores[4 * i + j], scale, j < 2 ? block.state.minus0 : block.state.minus1));
    }
    take_weights<C>(weight, i, block, sums);
  }
  return sums;
}

// All rows of a warp where nothing is selected, relative to the references there are. False: these are too small, or so
// large that their rounding would show; then weigh_rows() does it.
template <typename C>
__device__ __forceinline__ bool weigh_unselected(const TilePlace<C>& at, RowBlock<C> (&rows)[C::kRowBlocks]) {
  constexpr float kLargestReference = 0x1p14f;  // in logarithms of base 2: rounded by 2^-10
  if (at.tile == at.item.tiles.begin) return false;
  TileSums sums[C::kRowBlocks];
  bool fits = true;
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) {
    sums[i] = weigh_unselected<C>(rows[i], at.params.scales.exp2_scale);
    const blocks::RowState& state = rows[i].state;
    fits = fits && sums[i].row0 < C::kWeightLimit && sums[i].row1 < C::kWeightLimit &&
           fmaxf(fabsf(state.minus0), fabsf(state.minus1)) < kLargestReference;
  }
  if (__all_sync(~0u, fits) == 0) return false;  // also for NaN: a row without a reference
  add_sums<C>(sums, rows);
  return true;
}

// All rows of a warp of 16-bit inputs: blocks of 16 side by side, that the latencies of one hide behind the other.
template <typename C>
__device__ __forceinline__ void weigh_rows(const TilePlace<C>& at, PackedTile<C> (&packed)[C::kRowBlocks],
                                           RowBlock<C> (&rows)[C::kRowBlocks]) {
  const ForwardParams& params = at.params;
  const int lane = Products<C>::lane();
  std::uint32_t kept = kAllPlaces;
  if constexpr (C::kAll) {
    kept = prepare<C>(at, packed[0].words, lane);
    if (at.pass != 0) return;
  } else if constexpr (C::kKind == Kind::any) {
    if (params.keep != 0) {
#pragma unroll
      for (PackedTile<C>& tile : packed) prune<C>(tile, params.keep, params.tiles.places_log2, lane & 3);
    }
  }
  const bool apart = C::kAll && params.extras.counts_apart != 0;
  // No row has a reference yet: the first tile.
  bool raises = apart || __all_sync(~0u, std::isnan(rows[0].state.minus0)) != 0;
  TileSums sums[C::kRowBlocks];
#pragma unroll 1
  for (;;) {
    blocks::Raised raised[C::kRowBlocks];
    if (raises) {
#pragma unroll
      for (int i = 0; i < C::kRowBlocks; ++i) {
        raised[i] = blocks::raise_reference<C>(packed[i], params.scales, rows[i].state);
        blocks::shrink(raised[i], rows[i].state, rows[i].out);
      }
      if constexpr (C::kAll) {
        if (apart) count_apart<C>(at, kept, packed[0].words, raised[0], rows[0]);
      }
    }
    if (C::kKind == Kind::fours && params.one_of_two != 0) {
      weigh_blocks<Selecting<C, Selection::one_of_two>>(params.scales, packed, rows, sums, lane);
    } else {
      weigh_blocks<Selecting<C, Selection::two_of_four>>(params.scales, packed, rows, sums, lane);
    }
    const bool fits = sums_fit<C>(sums);
    if (raises) {
#pragma unroll
      for (int i = 0; i < C::kRowBlocks; ++i) blocks::forget_unset(raised[i], rows[i].state);
    }
    if (raises || fits) break;
    raises = true;
  }
  if (C::kAll && params.extras.drop_below != 0) return;  // they are counted
  add_sums<C>(sums, rows);
}

// fp32: weights of all scores in the order of a dense A operand, and their sums, unrounded. kFar:
// see blocks/scores32.h. tf32: half a unit is added because the tensor core drops the bits below.
template <typename C, bool kFar>
__device__ __forceinline__ TileSums weigh_all(RowBlock<C>& block, float scale) {
  TileSums sums;
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
    sums.row0 += weight[0] + weight[1];
    sums.row1 += weight[2] + weight[3];
    block.weights[4 * i] = __float_as_uint(weight[0]) + kHalfUnit;
    block.weights[4 * i + kSecond] = __float_as_uint(weight[1]) + kHalfUnit;
    block.weights[4 * i + 3 - kSecond] = __float_as_uint(weight[2]) + kHalfUnit;
    block.weights[4 * i + 3] = __float_as_uint(weight[3]) + kHalfUnit;
  }
  return sums;
}

// 16 rows of fp32 inputs.
template <typename C>
__device__ __forceinline__ void weigh_rows(const TilePlace<C>& at, RowBlock<C>& block) {
  const ForwardParams& params = at.params;
  const int lane = own_thread() & 31;
  std::uint32_t kept = kAllPlaces;
  if constexpr (C::kAll) {
    kept = prepare<C>(at, block.scores, lane);
    if (at.pass != 0) return;
  } else if constexpr (C::kKind != Kind::pairs) {
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
    if constexpr (C::kSharesOutput) {  // the output is two warps'
      block.state.sum0 *= raised.shrink0;
      block.state.sum1 *= raised.shrink1;
    } else {
      blocks::shrink(raised, block.state, block.out);
    }
  }
  if constexpr (C::kSharesOutput) {
    block.shrink0 = raised.shrink0;
    block.shrink1 = raised.shrink1;
  }
  if constexpr (C::kAll) {
    if (params.extras.counts_apart != 0) count_apart<C>(at, kept, block.scores, raised, block);
  }
  const float largest = fmaxf(fabsf(block.state.minus0), fabsf(block.state.minus1)) * scale;
  const bool near = __all_sync(~0u, !(largest > blocks::tf32::kLargestNearReference)) != 0;
  const auto weigh = [&]<bool kFar>() {
    if constexpr (C::kKind == Kind::pairs) {
      TileSums sums;
      blocks::tf32::weigh_tile<C, kFar>(block.scores, tile::QuadTranspose::of_lane(lane & 3), scale, block.state,
                                        block.weights, block.metadata, sums.row0, sums.row1);
      return sums;
    } else {
      return weigh_all<C, kFar>(block, scale);
    }
  };
  const TileSums sums = near ? weigh.template operator()<false>() : weigh.template operator()<true>();
  if (raises) blocks::forget_unset(raised, block.state);
  if (C::kAll && params.extras.drop_below != 0) return;  // they are counted
  block.state.sum0 += sums.row0;
  block.state.sum1 += sums.row1;
}

}  // namespace dspattn::cuda::general
