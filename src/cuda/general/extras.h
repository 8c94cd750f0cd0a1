// What few problems ask of a tile beyond masks and a pattern: soft caps, dropout, the weights of pruned keys, heads
// that choose their keys together. Rolled loops: little code, which plain problems step over.
//
// Which places of a tile are kept is a word: bit i of place i in row g, bit 16 + i in row g + 8. A place is a word of
// PackedTile, or in fp32 the two rows' scores at place_register().
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/scores16.h"
#include "cuda/blocks/scores32.h"
#include "cuda/general/masks.h"
#include "cuda/general/params.h"
#include "cuda/general/products.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/single.h"
#include "cuda/tile/select_any.h"

namespace dspattn::cuda::general {

inline constexpr std::uint32_t kAllPlaces = ~0u;

// A word of another lane of the quad.
struct Exchange {
  template <typename Word>
  __device__ __forceinline__ Word operator()(Word word, int x) const {
    return __shfl_xor_sync(~0u, word, x);
  }
};

// Register of a lane's scores that has place i of row g; that of row g + 8 is two further. Groups have neighbouring
// places.
__device__ __forceinline__ constexpr int place_register(int i) { return 4 * (i >> 1) + (i & 1); }
// Its key, counted from the span's first.
template <typename C>
__device__ __forceinline__ int place_key(const tile::KeyTiles& tiles, int part, int t, int i) {
  return tile::key_of_column<C::kLayout, C::kTileK>(tiles, part, tile::accumulator_column(place_register(i), t));
}

// Places whose 16 bits of a mask are set, two rows a mask.
__device__ __forceinline__ std::uint32_t place_bit(std::uint32_t mask, int i) { return (mask & 0x10001u) << i; }
__device__ __forceinline__ std::uint32_t place_mask(std::uint32_t bits, int i) {
  return ((bits >> i) & 0x10001u) * 0xFFFFu;
}

// Of packed scores: each group's largest.
template <typename C>
__device__ __forceinline__ std::uint32_t kept_places(const ForwardParams& params,
                                                     const std::uint32_t (&words)[C::kTileK / 4], int t) {
  std::uint32_t left[C::kTileK / 4];
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) left[i] = words[i];
  tile::keep_largest<tile::PackedKeys>(left, params.keep, params.tiles.places_log2, t, Exchange{});
  std::uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) bits |= place_bit(tile::is_kept<tile::PackedKeys>(left[i]), i);
  return bits;
}

// Of fp32 numbers, one row after the other. numbers(row, left): of all places.
template <typename C, int kRows = 2, typename Numbers>
__device__ __forceinline__ std::uint32_t kept_by_rows(const ForwardParams& params, int t, Numbers numbers) {
  std::uint32_t bits = 0;
#pragma unroll 1
  for (int row = 0; row < kRows; ++row) {
    float left[C::kTileK / 4];
    numbers(row, left);
    tile::keep_largest<tile::SingleKeys>(left, params.keep, params.tiles.places_log2, t, Exchange{});
    std::uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) {
      if (tile::is_kept<tile::SingleKeys>(left[i]) != 0) kept |= 1u << i;
    }
    bits |= kept << (16 * row);
  }
  return bits;
}

// Masks all places but these.
template <typename C>
__device__ __forceinline__ void take_places(std::uint32_t (&words)[C::kTileK / 4], std::uint32_t bits) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) {
    words[i] = ptx::bit_select(place_mask(bits, i), words[i], blocks::kLowestPair);
  }
}
template <typename C>
__device__ __forceinline__ void take_places(float (&scores)[C::kTileK / 2], std::uint32_t bits) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) {
    if ((bits >> i & 1) == 0) scores[place_register(i)] = -INFINITY;
    if ((bits >> (16 + i) & 1) == 0) scores[place_register(i) + 2] = -INFINITY;
  }
}

// Soft caps. However low a score is, capped it is not: packed it must not look like a masked one.
template <typename C>
__device__ __forceinline__ void tell_from_masked(float (&scores)[C::kTileK / 2]) {
  constexpr float kLowestUnmasked = -65472.0f;  // one step of fp16 above the lowest
#pragma unroll
  for (float& score : scores) score = score == -INFINITY ? score : ptx::max_nan(score, kLowestUnmasked);
}
template <typename C>
__device__ __forceinline__ void cap_scores(float cap, std::uint32_t (&words)[C::kTileK / 4]) {
#pragma unroll 1
  for (int i = 0; i < C::kTileK / 4; ++i) {
    float row0, row1;
    ptx::unpack_f16x2(words[0], row0, row1);
    if (row0 > blocks::kLowestScore || std::isnan(row0)) row0 = soft_capped(row0, cap);
    if (row1 > blocks::kLowestScore || std::isnan(row1)) row1 = soft_capped(row1, cap);
    words[0] = ptx::pack_f16x2_clamped(row0, row1);
    go_round<1>(words);
  }
}
template <typename C>
__device__ __forceinline__ void cap_scores(float cap, float (&scores)[C::kTileK / 2]) {
#pragma unroll 1
  for (int i = 0; i < C::kTileK / 2; i += 2) {
    scores[0] = soft_capped(scores[0], cap);
    scores[1] = soft_capped(scores[1], cap);
    go_round<2>(scores);
  }
}

// A lane's two rows: positions in the sequence and heads; rows that do not exist have those of one that does.
struct OwnRows {
  int position0, position1;
  int head0, head1;
  bool exists0, exists1;
};

// Places that dropout leaves. `at`: of the tile.
template <typename C>
__device__ __forceinline__ std::uint32_t undropped_places(const ForwardParams& params, int sequence,
                                                          const OwnRows& rows, int first_key, int part, int t) {
  const Extras& extras = params.extras;
  const core::DropoutRow row0 = extras.random.row(sequence, rows.head0, rows.position0);
  const core::DropoutRow row1 = extras.random.row(sequence, rows.head1, rows.position1);
  std::uint32_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < C::kTileK / 4; ++i) {
    const auto key = static_cast<std::uint32_t>(first_key + place_key<C>(params.tiles, part, t, i));
    if (row0.bits(key) >= extras.drop_below) bits |= 1u << i;
    if (row1.bits(key) >= extras.drop_below) bits |= 1u << (16 + i);
  }
  return bits;
}

// Sums of the weights of some places.
struct PlaceSums {
  float row0 = 0, row1 = 0;
};
template <typename C>
__device__ __forceinline__ PlaceSums sum_places(const ScoreScales& scales, const RowState& state,
                                                const std::uint32_t (&words)[C::kTileK / 4], std::uint32_t bits) {
  const auto exponents = blocks::Exponents::of<C>(scales, state);
  PlaceSums sums;
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; i += 2) {
    float weight[4];
    exponents.weigh(ptx::bit_select(place_mask(bits, i), words[i], blocks::kLowestPair),
                    ptx::bit_select(place_mask(bits, i + 1), words[i + 1], blocks::kLowestPair), weight);
    sums.row0 += weight[0] + weight[1];
    sums.row1 += weight[2] + weight[3];
  }
  return sums;
}
template <typename C>
__device__ __forceinline__ PlaceSums sum_places(const ScoreScales& scales, const RowState& state,
                                                const float (&scores)[C::kTileK / 2], std::uint32_t bits) {
  PlaceSums sums;
  const auto weight = [&](float score, float minus) { return ptx::exp2_fast((score + minus) * scales.exp2_scale); };
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) {
    const int at = place_register(i);
    if ((bits >> i & 1) != 0) sums.row0 += weight(scores[at], state.minus0);
    if ((bits >> (16 + i) & 1) != 0) sums.row1 += weight(scores[at + 2], state.minus1);
  }
  return sums;
}

}  // namespace dspattn::cuda::general
