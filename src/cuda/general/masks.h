// Masks on a lane's fp32 scores of 16 rows x kTileK keys: bias, boolean tensor, and the band of diagonal, window and
// key length. Only tiles that need it come here.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/half.h"
#include "cuda/blocks/mask_pointers.h"
#include "cuda/blocks/scores16.h"
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
  int t;        // lane of the quad
  bool inside;  // every row sees all of the tile's keys
};

// Calls visit(register of row g, key within the span or a negative number) for all of a lane's scores.
template <typename C, typename Visit>
__device__ __forceinline__ void each_score(const tile::KeyTiles& tiles, int part, int t, Visit visit) {
#pragma unroll
  for (int block = 0; block < C::kTileK / 8; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      visit(4 * block + i, tile::key_of_column<C::kLayout, C::kTileK>(tiles, part, 8 * block + 2 * t + i));
    }
  }
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
__device__ __forceinline__ float biased(const ScoreScales& scales, float score, float bias) {
  constexpr float kLowestBiased = -65408.0f;  // kLowestBiasedPair of blocks/scores16.h
  constexpr float kLargest = 3.402823466e38f;
  if (bias == -INFINITY) return -INFINITY;
  const float sum = fmaf(bias, scales.bias_scale, C::kIsFp32 ? score * scales.score_unit : score);
  if constexpr (!C::kIsFp32) return ptx::max_nan(sum, kLowestBiased);
  return std::isinf(sum) ? copysignf(kLargest, sum) : sum;
}

template <typename C, typename ItemType>
__device__ __forceinline__ void mask_scores(const ForwardParams& params, const ItemType& item, const ScorePlace& at,
                                            float (&scores)[C::kTileK / 2]) {
  const tile::RowBand band = item.band;
  const int present = band.key_length - at.first_key;
  // Absent keys read the span's first: they are masked afterwards.
  const auto offset_of = [&](const MaskPointers& pointers, int key) {
    return static_cast<std::int64_t>(at.first_key + (key >= 0 && key < present ? key : 0)) * pointers.key_bytes;
  };
  if (params.bias.data != nullptr) {
    const int bytes = params.bias_type == BiasType::f32 ? 4 : 2;
    const MaskPointers bias(params.bias, bytes, item, at.row, 0);
    each_score<C>(params.tiles, at.part, at.t, [&](int i, int key) {
      const std::int64_t offset = offset_of(bias, key);
      scores[i] = biased<C>(params.scales, scores[i], load_bias<C>(bias.row0 + offset, params.bias_type));
      scores[i + 2] = biased<C>(params.scales, scores[i + 2], load_bias<C>(bias.row1 + offset, params.bias_type));
    });
  }
  if (params.allowed.data != nullptr) {
    const MaskPointers allowed(params.allowed, 1, item, at.row, 0);
    each_score<C>(params.tiles, at.part, at.t, [&](int i, int key) {
      const std::int64_t offset = offset_of(allowed, key);
      if (allowed.row0[offset] == 0) scores[i] = -INFINITY;
      if (allowed.row1[offset] == 0) scores[i + 2] = -INFINITY;
    });
  }
  if (at.inside) return;
  const int begin0 = band.begin(at.row) - at.first_key, end0 = band.end(at.row) - at.first_key;
  const int begin1 = band.begin(at.row + 8) - at.first_key, end1 = band.end(at.row + 8) - at.first_key;
  each_score<C>(params.tiles, at.part, at.t, [&](int i, int key) {
    if (key < 0 || key < begin0 || key >= end0) scores[i] = -INFINITY;
    if (key < 0 || key < begin1 || key >= end1) scores[i + 2] = -INFINITY;
  });
}

}  // namespace dspattn::cuda::general
