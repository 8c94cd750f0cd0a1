// From the fp32 scores of one key tile to sparse tf32 weights, for one warpgroup: mask, select, exponentiate.
//
// A thread holds rows g and g + 8 of its warp's 16 (g = lane / 4) and, of every pair of keys in its quad's share, both.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/mask_pointers.h"
#include "cuda/blocks/references.h"
#include "cuda/blocks/scales.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/pin.h"
#include "cuda/tile/pair_map.h"

namespace dspattn::cuda::blocks::tf32 {

template <typename C>
using Scores = float[C::kTileK / 2];

// Calls visit(register of row g, key within the block) for all of a thread's scores.
template <typename C, typename Visit>
__device__ __forceinline__ void each_score(const tile::KeyMap& keys, int part, int t, Visit visit) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int key = ptx::opaque(keys.key(part, 2 * t + i, e));
#pragma unroll
      for (int j = 0; j < C::kTileK / 16; ++j) {
        visit(tile::pair_register(j, i, e, C::kTileK), key);
        key += 8 * keys.group_step;
      }
    }
  }
}

// Masks what the diagonal, the window and the key length hide. `position` is where the row is on the diagonal and
// `length` the number of keys, both counted from the block's first key.
template <typename C>
__device__ __forceinline__ void mask_band(Scores<C>& scores, const tile::KeyMap& keys, int left, int right, int part,
                                          int t, int position, int length) {
  const auto begin = [&](int p) { return tile::clamp_to_block(p - left); };
  const auto end = [&](int p) { return tile::clamp_to_block(p + right + 1 < length ? p + right + 1 : length); };
  const int begin0 = begin(position), begin1 = begin(position + 8);
  const int end0 = end(position), end1 = end(position + 8);
  each_score<C>(keys, part, t, [&](int at, int key) {
    if (key < begin0 || key >= end0) scores[at] = -INFINITY;
    if (key < begin1 || key >= end1) scores[at + 2] = -INFINITY;
  });
}

// Adds the bias; -inf masks, and a finite bias does not, however low: sums stay finite. Absent keys read key 0's: they
// are masked afterwards.
template <typename C>
__device__ __forceinline__ void add_bias(Scores<C>& scores, const ScoreScales& scales, const tile::KeyMap& keys,
                                         const MaskPointers& bias, int present, int part, int t) {
  constexpr float kLargest = 3.402823466e38f;
  const auto add = [&](const std::uint8_t* pointer, float& score) {
    const float value = *reinterpret_cast<const float*>(pointer);
    const float sum = fmaf(value, scales.bias_scale, score * scales.score_unit);
    score = value == -INFINITY ? -INFINITY : std::isinf(sum) ? copysignf(kLargest, sum) : sum;
  };
  each_score<C>(keys, part, t, [&](int at, int key) {
    const int offset = (key < present ? key : 0) * bias.key_bytes;
    add(bias.row0 + offset, scores[at]);
    add(bias.row1 + offset, scores[at + 2]);
  });
}

// Masks what the boolean tensor hides.
template <typename C>
__device__ __forceinline__ void mask_allowed(Scores<C>& scores, const tile::KeyMap& keys, const MaskPointers& allowed,
                                             int present, int part, int t) {
  each_score<C>(keys, part, t, [&](int at, int key) {
    const int offset = (key < present ? key : 0) * allowed.key_bytes;
    if (allowed.row0[offset] == 0) scores[at] = -INFINITY;
    if (allowed.row1[offset] == 0) scores[at + 2] = -INFINITY;
  });
}

// Beyond this a reference's rounding (times `scale`, base 2) would show in the weights, and far beyond it overflow
// them.
inline constexpr float kLargestNearReference = 0x1p20f;

// Weights as the sparse product takes them, and their sums, unrounded, added to tile0 and tile1. Adding half a unit of
// tf32 rounds to nearest, because the tensor core drops the bits below: weights are not negative. A NaN may turn into
// something else here; the row's sum keeps it. kFar: the difference from the reference is taken before the product with
// `scale`, which is exact wherever weights are not 0; one instruction more a weight.
template <typename C, bool kFar>
__device__ __forceinline__ void weigh_tile(const Scores<C>& scores, const tile::QuadTranspose& transpose, float scale,
                                           const RowState& state, std::uint32_t (&weights)[C::kTileK / 4],
                                           std::uint32_t (&metadata)[C::kTileK / 32], float& tile0, float& tile1) {
  const float minus0 = state.minus0 * scale;
  const float minus1 = state.minus1 * scale;
  constexpr std::uint32_t kHalfUnit = 0x1000;
#pragma unroll
  for (int word = 0; word < C::kTileK / 32; ++word) {
    std::uint32_t second[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int j = 2 * word + (p >> 1);
      const int i = p & 1;
      const int a = tile::pair_register(j, i, 0, C::kTileK);
      const int b = tile::pair_register(j, i, 1, C::kTileK);
      const tile::KeptOfPair kept = tile::keep_one(scores[a], scores[b], scores[a + 2], scores[b + 2]);
      second[p] = kept.second;
      const float weight0 = ptx::exp2_fast(kFar ? (kept.row0 + state.minus0) * scale : fmaf(kept.row0, scale, minus0));
      const float weight1 = ptx::exp2_fast(kFar ? (kept.row1 + state.minus1) * scale : fmaf(kept.row1, scale, minus1));
      tile0 += weight0;
      tile1 += weight1;
      weights[tile::weight_register(j, i, 0)] = __float_as_uint(weight0) + kHalfUnit;
      weights[tile::weight_register(j, i, 1)] = __float_as_uint(weight1) + kHalfUnit;
    }
    const std::uint32_t own = tile::metadata_of_pairs(second);
    const std::uint32_t paired = transpose.exchange_pairs(own, __shfl_xor_sync(~0u, own, 1));
    metadata[word] = transpose.exchange_halves(paired, __shfl_xor_sync(~0u, paired, 2));
  }
}

// Minus the largest scores of a tile's two rows, over all their lanes; NaN: no visible key.
struct MinusTops {
  float row0, row1;
};
template <typename C>
__device__ __forceinline__ MinusTops minus_tops(const Scores<C>& scores) {
  float top0 = scores[0];
  float top1 = scores[2];
#pragma unroll
  for (int i = 1; i < C::kTileK / 4; ++i) {
    const int at = 4 * (i >> 1) + (i & 1);
    top0 = ptx::max_nan(top0, scores[at]);
    top1 = ptx::max_nan(top1, scores[at + 2]);
  }
  const auto over_quad = [](float x) {
    x = ptx::max_nan(x, __shfl_xor_sync(~0u, x, 1));
    return ptx::max_nan(x, __shfl_xor_sync(~0u, x, 2));
  };
  const auto minus = [](float top) { return top == -INFINITY ? NAN : -top; };
  return {minus(over_quad(top0)), minus(over_quad(top1))};
}

// Raises the references, which are scores here, to the tile's largest: a row's largest always survives pruning.
template <typename C>
__device__ __forceinline__ Raised raise_reference(const Scores<C>& scores, float scale, RowState& state) {
  const MinusTops tops = minus_tops<C>(scores);
  return raise_references(tops.row0, tops.row1, state, scale);
}

}  // namespace dspattn::cuda::blocks::tf32
