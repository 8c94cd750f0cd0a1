// From the scores of one key tile to sparse weights, for one warpgroup: round to packed fp16, mask, select,
// exponentiate.
//
// A thread holds rows g and g + 8 of its warp's 16 (g = lane / 4) and, of every group of four keys in its quad's share,
// all four.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/references.h"
#include "cuda/blocks/scales.h"
#include "cuda/blocks/selection.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/tile/coarse_exp2.h"
#include "cuda/tile/hidden.h"
#include "cuda/tile/select.h"

namespace dspattn::cuda::blocks {

// Rounding to fp16 clamps to this. Masked scores are -inf in fp32 and become the same: no score that a softmax could
// still tell from 0 lies there.
inline constexpr float kLowestScore = -65504.0f;
inline constexpr std::uint32_t kLowestPair = 0xFBFFFBFFu;
// What a finite bias, however low (models write masks as the lowest finite number), cannot push a score below: such a
// key is not masked. Three fp16 steps above the lowest, so that beside it a masked key's weight is still 0.
inline constexpr std::uint32_t kLowestBiasedPair = 0xFBFCFBFCu;  // -65408

template <typename C>
using Scores = float[C::kTileK / 2];

// Two 16-bit elements times two others.
template <typename C>
__device__ __forceinline__ std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  return C::kType == DType::bf16 ? ptx::multiply_bf16x2(a, b) : ptx::multiply_f16x2(a, b);
}

// Register of `scores` that holds element e of group block m, row g (row g + 8: two further).
template <typename C>
__device__ __forceinline__ constexpr int score_index(int m, int e) {
  return 4 * m + (e & 1) + (e >> 1) * (C::kTileK / 4);
}

using tile::Hidden;

// The packed scores of a tile, as they are compared: without what is hidden.
template <typename C, Hidden kHidden>
struct PackedScores {
  const Scores<C>& scores;
  std::uint32_t reach;        // half the length; negative: no key
  std::uint32_t distance[4];  // of the elements of group block 0 from the middle
  std::uint32_t step;         // from one group block to the next

  // The keys a row sees within a block are an interval: those no further from its middle than half its length. All of
  // these numbers are halves of small integers, exact in fp16, so two rows are tested at once. `position` is where row
  // g is on the diagonal and `length` the number of keys, both counted from the block's first key.
  __device__ __forceinline__ PackedScores(const Scores<C>& s, const tile::KeyMap& keys, int left, int right, int part,
                                          int t, int position, int length)
      : scores(s) {
    const auto interval = [&](int p, float& half, float& middle) {
      const auto first = static_cast<float>(tile::clamp_to_block(p - left));
      const auto last = static_cast<float>(tile::clamp_to_block(min(p + right + 1, length)) - 1);
      half = 0.5f * (last - first);
      middle = 0.5f * (last + first);
    };
    float half0, half1, middle0, middle1;
    interval(position, half0, middle0);
    interval(position + 8, half1, middle1);
    reach = ptx::pack_f16x2(half0, half1);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const auto key = static_cast<float>(keys.key(part, t, e));
      distance[e] = ptx::pack_f16x2(key - middle0, key - middle1);
    }
    const auto between = static_cast<float>(4 * keys.group_step);
    step = ptx::pack_f16x2(between, between);
  }

  // 0xFFFF for each row that sees the key.
  __device__ __forceinline__ std::uint32_t seen(int m, int e) const {
    return ptx::within_f16x2(ptx::multiply_add_f16x2(step, m, distance[e]), reach);
  }
  // Word of element e of group block m: row g in the low half, row g + 8 in the high one.
  __device__ __forceinline__ std::uint32_t word(int m, int e) const {
    if (kHidden == Hidden::lower && tile::in_upper_half(C::kPattern, e)) return kLowestPair;
    const int at = score_index<C>(m, e);
    const std::uint32_t score = ptx::pack_f16x2_clamped(scores[at], scores[at + 2]);
    if (kHidden == Hidden::upper && !tile::in_upper_half(C::kPattern, e)) return score;
    return ptx::bit_select(seen(m, e), score, kLowestPair);
  }
};

template <typename C>
struct PackedScores<C, Hidden::nothing> {
  const Scores<C>& scores;

  __device__ __forceinline__ std::uint32_t word(int m, int e) const {
    const int at = score_index<C>(m, e);
    return ptx::pack_f16x2_clamped(scores[at], scores[at + 2]);
  }
};

// Where exponentials are taken in fp16, so is the factor from scores to logarithms, and references are fp16 numbers.
// Not so in rows whose reference is larger than this, where steps of fp16 would be too coarse: their weights always
// come from the second pass, which is in fp32.
inline constexpr std::uint32_t kLargestHalfReference = 0x6BFF6BFFu;  // 4094

// From scores to logarithms of weights.
template <typename C>
__device__ __forceinline__ float exponent_scale(const ScoreScales& scales) {
  if constexpr (C::kHalfExponentials) {
    float low, high;
    ptx::unpack_f16x2(scales.exp2_scale_half, low, high);
    return low;
  }
  return scales.exp2_scale;
}

// Whether weights of pruned keys are summed up as tile/coarse_exp2.h has them.
template <typename C>
inline constexpr bool kCoarseRest = C::kRestMean&& C::kHalfExponentials;

// Where references are large, they are whole numbers of this (CoarseState of rest16.h).
inline constexpr float kLargeUnit = 8;

// The references that belong to scores `tops` of both rows; the lowest score, which is that of a masked key, has none.
template <typename C>
__device__ __forceinline__ void refer_to(std::uint32_t tops, const ScoreScales& scales, RowState& state) {
  float top0, top1;
  ptx::unpack_f16x2(tops, top0, top1);
  const float scale = exponent_scale<C>(scales);
  state.minus0 = top0 <= kLowestScore ? NAN : -fmaf(top0, scale, C::kHeadroom);
  state.minus1 = top1 <= kLowestScore ? NAN : -fmaf(top1, scale, C::kHeadroom);
  if constexpr (C::kHalfExponentials) {
    constexpr std::uint32_t kHeadroomPair = 0xC200C200u;  // -3 twice
    static_assert(C::kHeadroom == 3.0f);
    const std::uint32_t minus = ptx::fma_f16x2(tops, scales.exp2_scale_half ^ 0x80008000u, kHeadroomPair);
    const std::uint32_t small =
        ptx::within_f16x2(minus, kCoarseRest<C> ? tile::kLargestCoarseReference : kLargestHalfReference);
    if constexpr (kCoarseRest<C>) {
      state.minus0 = kLargeUnit * rintf(state.minus0 / kLargeUnit);
      state.minus1 = kLargeUnit * rintf(state.minus1 / kLargeUnit);
    }
    state.minus = minus | ~small;
    float minus0, minus1;
    ptx::unpack_f16x2(minus, minus0, minus1);
    if ((small & 0xFFFFu) != 0) state.minus0 = minus0;
    if (small >> 16 != 0) state.minus1 = minus1;
  }
}

// How scores become weights.
struct Exponents {
  float scale, minus0, minus1;

  template <typename C>
  __device__ __forceinline__ static Exponents of(const ScoreScales& scales, const RowState& state) {
    return {exponent_scale<C>(scales), state.minus0, state.minus1};
  }
  // Weights of one group's kept scores in the order of a sparse A operand.
  __device__ __forceinline__ void weigh(std::uint32_t first, std::uint32_t second, float* values) const {
    float first0, first1, second0, second1;
    ptx::unpack_f16x2(first, first0, first1);
    ptx::unpack_f16x2(second, second0, second1);
    values[0] = ptx::exp2_fast(fmaf(first0, scale, minus0));
    values[1] = ptx::exp2_fast(fmaf(second0, scale, minus0));
    values[2] = ptx::exp2_fast(fmaf(first1, scale, minus1));
    values[3] = ptx::exp2_fast(fmaf(second1, scale, minus1));
  }
};

// The same in fp16.
struct HalfExponents {
  std::uint32_t scale, minus;

  __device__ __forceinline__ std::uint32_t argument(std::uint32_t score) const {
    return ptx::fma_f16x2(score, scale, minus);
  }

  __device__ __forceinline__ void weigh(std::uint32_t first, std::uint32_t second, float* values) const {
    ptx::unpack_f16x2(ptx::exp2_f16x2(argument(first)), values[0], values[2]);
    ptx::unpack_f16x2(ptx::exp2_f16x2(argument(second)), values[1], values[3]);
  }
};

// The same, where weights of pruned keys are summed up in whole tiles of keys.
struct CoarseRestExponents : HalfExponents {
  tile::CoarseWeights coarse;
};

// A slice of a tile: two neighbouring group blocks (32 keys) after selection: what is exponentiated next.
struct Slice {
  std::uint32_t first[2], second[2];  // per group block
};

// Where the upper half of a block is hidden, groups keep their other two keys: nothing is compared.
template <typename C, int kSlice>
__device__ __forceinline__ void take_slice(const PackedScores<C, Hidden::lower>& packed, Slice& slice) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    slice.first[i] = packed.word(2 * kSlice + i, 0);
    slice.second[i] = packed.word(2 * kSlice + i, C::kSelection == Selection::two_of_four ? 1 : 2);
  }
}

// What is not kept of a group.
template <typename C>
__device__ __forceinline__ tile::LeftOut left_out(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  return C::kSelection == Selection::two_of_four ? tile::left_out_of_four(a, b, c, d)
                                                 : tile::left_out_of_two(a, b, c, d);
}

// take_left_out() is given what is not kept, where that counts (rest = mean).
template <typename C, int kSlice, typename Packed, typename TakeLeftOut>
__device__ __forceinline__ tile::KeptPair select_slice(const Packed& packed, Slice& slice, TakeLeftOut take_left_out) {
  tile::Kept kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint32_t p[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) p[e] = packed.word(2 * kSlice + i, e);
    kept[i] = C::kSelection == Selection::two_of_four ? tile::keep_two_of_four(p[0], p[1], p[2], p[3])
                                                      : tile::keep_one_of_two(p[0], p[1], p[2], p[3]);
    slice.first[i] = kept[i].first;
    slice.second[i] = kept[i].second;
    if constexpr (C::kRestMean) {
      take_left_out(left_out<C>(p[0], p[1], p[2], p[3]));
    }
  }
  return tile::pair_kept<2 * (kSlice & 1)>(kept[0], kept[1]);
}

// Raises the references to the tile's largest scores: a row's largest always survives pruning.
template <typename C, typename Packed>
__device__ __forceinline__ Raised raise_reference(const Packed& packed, const ScoreScales& scales, RowState& state) {
  std::uint32_t largest = packed.word(0, 0);
#pragma unroll
  for (int i = 1; i < C::kTileK / 4; ++i) largest = ptx::max_f16x2(largest, packed.word(i / 4, i % 4));
  largest = ptx::max_f16x2(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = ptx::max_f16x2(largest, __shfl_xor_sync(~0u, largest, 2));
  RowState tile = state;
  refer_to<C>(largest, scales, tile);
  const Raised result = raise_references(tile.minus0, tile.minus1, state);
  // Each half follows its row.
  const std::uint32_t rows =
      (state.minus0 == tile.minus0 ? 0xFFFFu : 0u) | (state.minus1 == tile.minus1 ? ~0xFFFFu : 0u);
  state.minus = ptx::bit_select(rows, tile.minus, state.minus);
  return result;
}

// The largest of the first keys as the reference: it need not be the largest of all. A row that sees none of them has
// no reference yet.
template <typename C, typename Packed>
__device__ __forceinline__ void sample_reference(const Packed& packed, const ScoreScales& scales, RowState& state) {
  std::uint32_t largest = ptx::max_f16x2(ptx::max_f16x2(packed.word(0, 0), packed.word(0, 1)),
                                         ptx::max_f16x2(packed.word(0, 2), packed.word(0, 3)));
  largest = ptx::max_f16x2(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = ptx::max_f16x2(largest, __shfl_xor_sync(~0u, largest, 2));
  refer_to<C>(largest, scales, state);
}

}  // namespace dspattn::cuda::blocks
