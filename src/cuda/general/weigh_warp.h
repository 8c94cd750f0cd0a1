// From a warp's scores of a tile to weights: masked where the tile needs it, packed, weighed.
#pragma once

#include <cstdint>

#include "cuda/blocks/scores16.h"
#include "cuda/general/item.h"
#include "cuda/general/masks.h"
#include "cuda/general/params.h"
#include "cuda/general/products.h"
#include "cuda/general/weigh.h"

namespace dspattn::cuda::general {

// Of 16 rows, `row` being a lane's first within the CTA's, and a part of a tile's columns.
template <typename C>
__device__ __forceinline__ ScorePlace place_of(const TilePlace<C>& at, int row, int part) {
  const tile::KeyTiles& tiles = at.params.tiles;
  ScorePlace place{at.item.row_begin + row, tiles.first_key(at.tile), tiles.part(at.tile), own_thread() & 3};
  place.first_column = part * C::kPartColumns;
  if constexpr (C::kAll) {
    const tile::GroupRows& group = at.item.group;
    const auto head = [&](int r) { return min(group.head(r), group.heads - 1); };
    place.row = at.item.row_begin + group.position(row);
    place.below = group.position(row + 8) - group.position(row);
    place.head = head(row);
    place.head_below = head(row + 8);
    if (at.params.extras.cap_before_bias != 0 && at.pass == 0) place.cap = at.params.extras.cap;
  }
  return place;
}

// Its scores are compared as the product leaves them.
template <typename C>
__device__ __forceinline__ bool is_bare(const TilePlace<C>& at) {
  if constexpr (C::kKeepsAddresses) return at.bare != 0;
  return at.params.bare_scores != 0 && is_interior(at);
}

// The scores of 16 rows as they are compared, or of a part of their columns: what is masked is -inf, but for what the
// band hides from `fours`.
template <typename C>
__device__ __forceinline__ void finish_scores(const TilePlace<C>& at, int block, int part,
                                              float (&scores)[C::kPartColumns / 2]) {
  const ForwardParams& params = at.params;
  const RowsItem& item = at.item;
  if (!C::kIsFp32 && params.score_scale != 1.0f) {
#pragma unroll
    for (float& score : scores) score *= params.score_scale;
  }
  const ScorePlace place = place_of<C>(at, own_row<C>() + 16 * block, part);
  if (params.bias.data != nullptr || params.allowed.data != nullptr) mask_by_tensors<C>(params, item, place, scores);
  if (item.lacks_pages != 0) mask_pages<C>(params, item.sequence, item.band.key_length, place, scores);
  if (C::kKind != Kind::fours && !is_interior<C>(at)) mask_band_of_places<C>(params.tiles, item.band, place, scores);
}

// No row misses a key of the tile.
template <typename C>
__device__ __forceinline__ bool is_interior(const TilePlace<C>& at) {
  return at.tile >= at.item.interior.begin && at.tile < at.item.interior.end;
}

// Masks a warp's scores of a tile where it needs that.
template <typename C>
__device__ __forceinline__ void finish_warp(const TilePlace<C>& at, int part, RowBlock<C> (&rows)[C::kOutBlocks]) {
  if (!is_bare(at)) {
#pragma unroll
    for (int i = 0; i < C::kRowBlocks; ++i) finish_scores<C>(at, i, part, rows[i].scores);
  }
  if constexpr (C::kAll && !C::kIsFp32) {
    if (at.params.extras.cap != 0) tell_from_masked<C>(rows[0].scores);
  }
}

// Packs a warp's finished scores.
template <typename C>
__device__ __forceinline__ void pack_warp(const TilePlace<C>& at, int part, const RowBlock<C> (&rows)[C::kOutBlocks],
                                          PackedTile<C> (&packed)[C::kRowBlocks]) {
  if (C::kKind == Kind::fours && !is_interior<C>(at)) {
    const tile::KeyTiles& tiles = at.params.tiles;
    const tile::RowBand& band = at.item.band;
    const int first_key = tiles.first_key(at.tile);
#pragma unroll
    for (int i = 0; i < C::kRowBlocks; ++i) {
      const int position = at.item.row_begin + own_row<C>() + 16 * i + band.diagonal - first_key;
      packed[i].pack_seen(part, BandedScores<C>(rows[i].scores, tiles.keys, band.left, band.right, tiles.part(at.tile),
                                                own_thread() & 3, position, band.key_length - first_key));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) packed[i].pack(part, rows[i].scores);
}

// Both, with one branch for most tiles.
template <typename C>
__device__ __forceinline__ void finish_and_pack(const TilePlace<C>& at, int part, RowBlock<C> (&rows)[C::kOutBlocks],
                                                PackedTile<C> (&packed)[C::kRowBlocks]) {
  if (!C::kAll && !C::kStraightScores && is_bare(at)) {
#pragma unroll
    for (int i = 0; i < C::kRowBlocks; ++i) packed[i].pack(part, rows[i].scores);
    return;
  }
  finish_warp<C>(at, part, rows);
  pack_warp<C>(at, part, rows, packed);
}

// The same of all parts. compute(part): as below.
template <typename C, typename Compute>
__device__ __forceinline__ void pack_parts(const TilePlace<C>& at, RowBlock<C> (&rows)[C::kOutBlocks],
                                           PackedTile<C> (&packed)[C::kRowBlocks], Compute compute) {
  if (C::kStraightScores && is_bare(at)) {
#pragma unroll
    for (int part = 0; part < C::kScoreParts; ++part) {
      if (part > 0) compute(part);
#pragma unroll
      for (int i = 0; i < C::kRowBlocks; ++i) packed[i].pack(part, rows[i].scores);
    }
    return;
  }
#pragma unroll
  for (int part = 0; part < C::kScoreParts; ++part) {
    if (part > 0) compute(part);
    finish_and_pack<C>(at, part, rows, packed);
  }
}

// Masks, selects and exponentiates a warp's scores of a tile. compute(part): computes those of a part of its columns;
// those of the first are there.
template <typename C, typename Compute>
__device__ __forceinline__ void weigh_warp(const TilePlace<C>& at, Products<C>& products, Compute compute) {
  auto& rows = products.rows;
  if constexpr (C::kIsFp32) {
    finish_warp<C>(at, 0, rows);
#pragma unroll
    for (int i = 0; i < C::kRowBlocks; ++i) weigh_rows<C>(at, rows[i]);
  } else {  // packed before anything else: half of the registers
    PackedTile<C> packed[C::kRowBlocks];
    if constexpr (C::kWeighsUnselected) {
      finish_warp<C>(at, 0, rows);
      if (at.params.keep == 0 && weigh_unselected<C>(at, rows)) return;
      pack_warp<C>(at, 0, rows, packed);
    } else {
      pack_parts<C>(at, rows, packed, compute);
    }
    weigh_rows<C>(at, packed, rows);
  }
}

}  // namespace dspattn::cuda::general
