// Mask tensors where keys are the rows of scores (key_rows.h): how 64 queries by 64 keys of one reach a warpgroup.
//
// A boolean mask is turned to bits before, and every thread has one word of them: its two keys, and 16 queries. Bits
// lie such that a shift brings those of two keys and two neighbouring queries to the highest bit of a byte each, from
// where one instruction makes masks of two halves of them.
//
// A bias of 16-bit elements comes as it is, queries as rows, and is transposed when it is read (ldmatrix): 2 KB for
// each warp, of every query 16 bytes of the keys of rows 0 .. 7 and 16 bytes of those of rows 8 .. 15. Such 16 bytes
// are two runs of four neighbouring keys. Queries 4 .. 7 of eight have the two the other way round: eight rows of a
// matrix then lie in all banks. One warp copies a tile, two queries of all four warps' keys at a time: queries lie such
// that those are in all banks, too.
#pragma once

#include <cstdint>

#include "cuda/tile/key_map.h"

namespace dspattn::cuda::tile {

inline constexpr int kMaskTileQueries = 64, kMaskTileKeys = 64;

// Packed scores of a thread: word 2j + i is its key i and queries 8j + 2t (low half) and the next. The bit of a half.
DSPATTN_HOST_DEVICE constexpr int mask_bit(int word, int half) { return 8 * (2 * (word & 1) + half) + 7 - word / 2; }

// Words of a block of 128 keys and a query tile lie together, those of its first 64 keys first.
inline constexpr int kMaskWordsOfTile = 128, kMaskTilesOfBlock = 2;

// Where 16 bytes of a bias lie, of a query and rows 8 upper .. 8 upper + 7 of a warp's 16.
inline constexpr int kBiasWarpBytes = kMaskTileQueries * 32;
DSPATTN_HOST_DEVICE constexpr int bias_offset(int warp, int query, int upper) {
  const int place = query ^ warp;
  return warp * kBiasWarpBytes + place * 32 + ((upper ^ (place >> 2 & 1)) << 4);
}

// Which run of four keys a lane copies of every second query, and where to. Four neighbours copy 32 bytes.
struct BiasRun {
  int warp, element;  // of the four groups of the warp
  int query;          // the first

  DSPATTN_HOST_DEVICE static constexpr BiasRun of(int lane) { return {lane & 3, lane >> 2 & 3, lane >> 4}; }
  DSPATTN_HOST_DEVICE constexpr int key(const KeyMap& keys, int part) const {
    return keys.key(part, 4 * warp, element);
  }
  // Of one of its queries.
  DSPATTN_HOST_DEVICE constexpr int offset(int of_query) const {
    return bias_offset(warp, of_query, element & 1) + 8 * (element >> 1);
  }
};
inline constexpr int kBiasRunQueries = 2;  // between a lane's queries

}  // namespace dspattn::cuda::tile
