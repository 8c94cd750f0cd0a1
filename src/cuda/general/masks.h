// Masks on a lane's fp32 scores of 16 rows x kTileK keys: bias, boolean tensor, and the band of diagonal, window and
// key length. Only tiles that need it come here.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/mask_pointers.h"
#include "cuda/general/params.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/single.h"
#include "cuda/tile/key_tiles.h"

namespace dspattn::cuda::general {

// Where 16 rows of a tile's scores stand.
struct ScorePlace {
  int row;        // of the sequence: row g of the lane; the other is row + 8
  int first_key;  // of the tile's span
  int part;
  int t;  // lane of the quad
  // The lane's other row: positions below this one. Heads of both, counted from the item's.
  int below = 8;
  int head = 0, head_below = 0;
  float cap = 0;         // of scores before a bias is added; 0: none
  int first_column = 0;  // where scores are of a part of the tile's columns
};

// cap * tanh(score / cap); what is masked stays so.
__device__ __forceinline__ float soft_capped(float score, float cap) {
  return score == -INFINITY ? score : cap * tanhf(score / cap);
}

template <typename C>
__device__ __forceinline__ float load_bias(const std::uint8_t* at, BiasType type) {
  if (C::kIsFp32 || type == BiasType::f32) return *reinterpret_cast<const float*>(at);
  const std::uint32_t bits = *reinterpret_cast<const std::uint16_t*>(at);
  if constexpr (C::kType == DType::bf16) return __uint_as_float(bits << 16);
  float low, high;
  ptx::unpack_f16x2(bits, low, high);
  return low;
}

// -inf masks, and a finite bias does not, however low: 16-bit scores stay above the masked one, fp32 ones finite.
template <typename C>
__device__ __forceinline__ float biased(const ScoreScales& scales, float score, float bias, float cap = 0) {
  constexpr float kLowestBiased = -65408.0f;  // kLowestBiasedPair of blocks/scores16.h
  constexpr float kLargest = 3.402823466e38f;
  if (bias == -INFINITY) return -INFINITY;
  if constexpr (C::kIsFp32) score *= scales.score_unit;
  if (cap != 0) score = soft_capped(score, cap);
  const float sum = fmaf(bias, scales.bias_scale, score);
  if constexpr (!C::kIsFp32) return ptx::max_nan(sum, kLowestBiased);
  return std::isinf(sum) ? copysignf(kLargest, sum) : sum;
}

// Registers cannot be counted through: in rolled loops they go round, kStep at a time.
template <int kStep, typename Word, int kCount>
__device__ __forceinline__ void go_round(Word (&words)[kCount]) {
  Word first[kStep];
#pragma unroll
  for (int i = 0; i < kStep; ++i) first[i] = words[i];
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i] = i + kStep < kCount ? words[i + kStep] : first[i + kStep - kCount];
}

// Mask tensors, eight columns at a time: unrolled, all loads at once would take the registers.
template <typename C, typename Params, typename ItemType, int kScores>
__device__ __forceinline__ void mask_by_tensors(const Params& params, const ItemType& item, const ScorePlace& at,
                                                float (&scores)[kScores]) {
  const int last = item.rows - 1;  // rows past the end read the last row: their results are not stored
  const auto rows_of = [&](const MaskTensor& mask, int bytes) {
    return MaskPointers(mask, bytes, item.sequence, item.head + at.head, min(at.row, last), item.head + at.head_below,
                        min(at.row + at.below, last));
  };
  const MaskPointers bias = rows_of(params.bias, params.bias_type == BiasType::f32 ? 4 : 2);
  const MaskPointers allowed = rows_of(params.allowed, 1);
  const int present = item.band.key_length - at.first_key;
  const int end = at.first_column + 2 * kScores;
#pragma unroll 1
  for (int column = at.first_column + 2 * at.t; column < end; column += 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = tile::key_of_column<C::kLayout, C::kTileK>(params.tiles, at.part, column + i);
      // Absent keys read the span's first: they are masked afterwards.
      const auto from = static_cast<std::int64_t>(at.first_key + (key >= 0 && key < present ? key : 0));
      if (params.bias.data != nullptr) {
        const auto add = [&](const std::uint8_t* row, float& score) {
          score = biased<C>(params.scales, score, load_bias<C>(row + from * bias.key_bytes, params.bias_type), at.cap);
        };
        add(bias.row0, scores[i]);
        add(bias.row1, scores[i + 2]);
      }
      if (params.allowed.data != nullptr) {
        if (allowed.row0[from * allowed.key_bytes] == 0) scores[i] = -INFINITY;
        if (allowed.row1[from * allowed.key_bytes] == 0) scores[i + 2] = -INFINITY;
      }
    }
    go_round<4>(scores);
  }
}

// Keys in no page.
template <typename C, int kScores>
__device__ __forceinline__ void mask_pages(const ForwardParams& params, int sequence, int key_length,
                                           const ScorePlace& at, float (&scores)[kScores]) {
  const int end = at.first_column + 2 * kScores;
#pragma unroll 1
  for (int column = at.first_column + 2 * at.t; column < end; column += 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = at.first_key + tile::key_of_column<C::kLayout, C::kTileK>(params.tiles, at.part, column + i);
      // Keys past the length are masked afterwards, and empty places, which stand before a span's first key.
      if (key >= at.first_key && key < key_length && params.pages.page_of(sequence, key) < 0) {
        scores[i] = scores[i + 2] = -INFINITY;
      }
    }
    go_round<4>(scores);
  }
}

// What the diagonal, the window and the key length hide, and empty places.
template <typename C, int kScores>
__device__ __forceinline__ void mask_band(const tile::KeyTiles& tiles, const tile::RowBand& band, const ScorePlace& at,
                                          float (&scores)[kScores]) {
  const int begin0 = band.begin(at.row) - at.first_key, end0 = band.end(at.row) - at.first_key;
  const int begin1 = band.begin(at.row + at.below) - at.first_key, end1 = band.end(at.row + at.below) - at.first_key;
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    const int column = at.first_column + 8 * (i >> 1) + 2 * at.t + (i & 1);
    const int key = tile::key_of_column<C::kLayout, C::kTileK>(tiles, at.part, column);
    float* score = scores + 4 * (i >> 1) + (i & 1);
    if (key < 0 || key < begin0 || key >= end0) score[0] = -INFINITY;
    if (key < 0 || key < begin1 || key >= end1) score[2] = -INFINITY;
  }
}

// The same of the forward kernel. Where nothing is pruned a lane's columns are consecutive keys: those a row sees are
// neighbouring bits of a word.
template <typename C, int kScores>
__device__ __forceinline__ void mask_band_of_places(const tile::KeyTiles& tiles, const tile::RowBand& band,
                                                    const ScorePlace& at, float (&scores)[kScores]) {
  if (C::kLayout != tile::TileLayout::places || tiles.group != 1) return mask_band<C>(tiles, band, at, scores);
  constexpr int kPlaces = kScores / 2;
  const int first = at.first_key + at.t * (C::kTileK / 4) + at.first_column / 4;
  const auto seen = [&](int row) {
    const auto below = [&](int key) { return (1u << min(max(key - first, 0), kPlaces)) - 1; };
    return below(band.end(row)) & ~below(band.begin(row));
  };
  const std::uint32_t seen0 = seen(at.row), seen1 = seen(at.row + at.below);
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    float* score = scores + 4 * (i >> 1) + (i & 1);
    if ((seen0 >> i & 1) == 0) score[0] = -INFINITY;
    if ((seen1 >> i & 1) == 0) score[2] = -INFINITY;
  }
}

}  // namespace dspattn::cuda::general
