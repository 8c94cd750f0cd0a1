// What the producer tells the others about an item: the consumers, and those of its own warps that did not take it.
#pragma once

#include <cstdint>

#include "cuda/tile/means.h"

namespace dspattn::cuda::blocks {

// What one consumer warpgroup has to do for an item, in tiles and key blocks counted in the order they are loaded.
struct Share {
  int begin, end;                    // tiles that any of its rows sees
  int interior_begin, interior_end;  // key blocks that need no masking
  int skip_before, skip_after;       // entries of the ring that only other warpgroups need
};

// Who loads an item's last key block, when it has fewer than 128 keys (none: it has not): TMA, with rows past the
// sequence's end besides, or threads.
enum class Tail : std::int16_t { none, by_tma, by_threads };

template <int kConsumers>
struct Item {
  int valid;      // 0: no more items
  int row_begin;  // first query row of the tile, within the sequence
  int rows;       // query rows of the sequence; the item's are those from row_begin up to this
  int batch;      // of the output
  int out_row;    // row of the output that holds row row_begin
  int sequence;   // index along the masks' batch dimension
  int head;
  int diagonal;  // of this sequence, see RowBand
  int key_length;
  std::int64_t out_offset;  // elements to row row_begin of the output
  std::int64_t lse_offset;
  Share shares[kConsumers];
  Tail tail;
  std::int16_t common;  // pairs: K and V are the same for both CTAs
  int entries;          // of the ring: the tiles of all its key blocks, and what of Q is loaded that way
  int k_row;            // row of K and V that holds the sequence's key 0
  int first_block;      // the key block that is loaded first
  tile::TileEntries means;  // rest = mean: of all heads' entries
};

// A consumer may still write the results of an item whose two successors are already announced; one more is a power
// of 2.
inline constexpr int kItemSlots = 4;

}  // namespace dspattn::cuda::blocks
