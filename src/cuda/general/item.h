// What a CTA of the general forward works on: a tile of query rows, and the keys they see.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/blocks/item.h"
#include "cuda/blocks/work.h"
#include "cuda/general/copy.h"
#include "cuda/general/extras.h"
#include "cuda/general/params.h"
#include "cuda/tile/key_tiles.h"

namespace dspattn::cuda::general {

// It waits in shared memory until it is needed: registers are short.
struct RowsItem : Item<1> {
  tile::RowBand band;
  tile::TileRange tiles, interior;  // that any row sees; that all rows see all keys of
  const std::uint8_t* q;            // of the tile's first row
  const std::uint8_t* k;            // of the sequence's key 0, or of page 0
  const std::uint8_t* v;            // the same, at the first column that the CTA computes
  int column;                       // that one
  int lacks_pages;                  // 1: keys that the tile may see are in no page
  int cheap_end;                    // tiles before this one are copied cheaply (copy.h, NextTile)
  tile::GroupRows group;            // heads in the tile's rows
  int round;                        // of the CTA
  int asked;                        // 1: what it begins with is asked for at the end of the item before
  int phase;                        // two stages: of tile i is stage (i + phase) & 1
};

// The same with what waits there where everything is served (Scope::all).
struct FullItem : RowsItem {
  float rest[kMostTileRows];              // rest = mean: weights of the rows' pruned keys so far
  std::uint32_t kept[kMostTileRows * 2];  // passes that choose: places that a thread keeps
  float shares[kMostTileRows / 16][64];   // heads in parts: a key's shares so far, of a warp's position
  int part, own_part;                     // of the heads: that Q is now of, that the CTA writes
};
template <typename C>
using ItemOf = std::conditional_t<C::kAll, FullItem, RowsItem>;

// Where each thread finds its chunk of the next tiles of K and V (copy.h), where registers are too short for that.
struct RememberedTiles {
  NextTile next_k[kCopyingThreads], next_v[kCopyingThreads];
};
struct NoTiles {};

// A CTA's own shared memory, beside its tiles.
template <typename C>
struct Own {
  ItemOf<C> items[C::kItemSlots];
  [[no_unique_address]] std::conditional_t<C::kCheapCopies && !C::kKeepsAddresses, RememberedTiles, NoTiles> remembered;
};

// Query rows of a CTA's tile.
template <typename C>
__device__ __forceinline__ int tile_rows() {
  return threads<C>() / 32 * C::kWarpRows;
}

__device__ __forceinline__ bool sees_keys(const RowsItem& item) {
  return item.valid != 0 && item.tiles.begin < item.tiles.end;
}

// What the CTA works on in a round, for one thread. valid: 0 where there are no rows.
template <typename C>
__device__ __forceinline__ void describe_rows(const ForwardParams& params, int round, ItemOf<C>& item) {
  item.round = round;
  item.asked = 0;
  const int cta = static_cast<int>(blockIdx.x);
  const int index = C::kAll ? cta / params.column_parts : cta;
  item.valid = 0;
  if (round >= params.work.order.rounds) return;
  const tile::ItemIndex of_round = tile::item_of_round<false>(params.work.order, round, index);
  if (of_round.row_tile < 0) return;
  Work work;
  const int n_k = describe_sequence(params.work, params.work.heads.quotient(of_round.sequence_head), work);
  work.head = params.work.heads.remainder(of_round.sequence_head);
  item.group = params.group;
  if constexpr (C::kAll) {
    const int kv_head = work.head / params.group.parts();
    item.part = item.own_part = work.head - kv_head * params.group.parts();
    item.group = params.group.part(item.part);
    work.head = kv_head * params.group.all + item.part * tile::kMostGroupRows;
  }
  // Last rows first: under a causal mask they see the most keys.
  const int positions = params.group.positions(tile_rows<C>());
  work.row_begin = (params.work.order.row_tiles.value - 1 - of_round.row_tile) * positions;
  if (work.row_begin >= work.rows) return;
  item.valid = 1;
  describe_keys<C>(params.work, n_k, work);
  const std::int64_t row = work.q_row + work.row_begin;
  item.row_begin = work.row_begin;
  item.rows = work.rows;
  item.batch = work.batch;
  item.out_row = static_cast<int>(row);
  item.sequence = work.sequence;
  item.head = work.head;
  item.k_row = work.k_row;
  item.column = C::kAll ? (cta - index * params.column_parts) * C::kHeadDim : 0;
  item.lacks_pages = 0;
  item.cheap_end = params.cheap_copies != 0 ? params.tiles.tiles_within(work.band.key_length) : 0;
  item.out_offset = params.out.offset(work.batch, work.head, row) + item.column;
  item.lse_offset = params.lse.offset(work.batch, work.head, row);
  item.band = work.band;
  const int last = min(work.row_begin + positions, work.rows) - 1;
  item.tiles = tile::visible_tiles(params.tiles, work.band, work.row_begin, last);
  item.interior = tile::interior_tiles(params.tiles, work.band, work.row_begin, last);
  item.phase = -item.tiles.begin;
  const int kv_head = params.work.heads_per_kv_head.quotient(work.head);
  const auto row_of = [&](const RowsView& view, int batch, int head, std::int64_t at, int column) {
    return static_cast<const std::uint8_t*>(view.data) + (view.offset(batch, head, at) + column) * C::kElementBytes;
  };
  const int batch = params.pages.table != nullptr ? 0 : work.batch;
  item.q = row_of(params.q, work.batch, work.head, row, 0);
  item.k = row_of(params.k, batch, kv_head, work.k_row, 0);
  item.v = row_of(params.v, batch, kv_head, work.k_row, item.column);
}

// And in the round after that.
template <typename C>
__device__ __forceinline__ void describe_next(const ForwardParams& params, const ItemOf<C>& item, ItemOf<C>& next) {
  describe_rows<C>(params, item.round + 1, next);
  if (!sees_keys(item) || !sees_keys(next)) return;
  next.asked = 1;
  next.phase += item.phase + item.tiles.end;
}

// The next item becomes the one that is worked on.
template <typename C>
__device__ __forceinline__ void go_on(Own<C>& own) {
  constexpr int kWords = sizeof(ItemOf<C>) / sizeof(std::uint32_t);
  static_assert(sizeof(ItemOf<C>) % sizeof(std::uint32_t) == 0 && kWords <= C::kMostThreads);
  auto* words = reinterpret_cast<std::uint32_t*>(own.items);
  __syncthreads();  // all have left the item
  if (const int i = own_thread(); i < kWords) words[i] = words[kWords + i];
  __syncthreads();
}

// Tells all threads whether all pages of the tile's keys are there: then no key need be looked up to be masked.
template <typename C>
__device__ __forceinline__ void look_for_pages(const ForwardParams& params, RowsItem& item) {
  const int size = params.pages.size.value;
  const int end = min(params.tiles.first_key(item.tiles.end - 1) + params.tiles.span, item.band.key_length);
  for (int key = (params.tiles.first_key(item.tiles.begin) / size + own_thread()) * size; key < end;
       key += threads<C>() * size) {
    if (params.pages.page_of(item.sequence, key) < 0) item.lacks_pages = 1;
  }
  __syncthreads();
}

// Row g of a lane's first 16 rows, within the CTA's.
template <typename C>
__device__ __forceinline__ int own_row() {
  const int thread = own_thread();
  return (thread >> 5) * 16 * C::kRowBlocks + ((thread & 31) >> 2);
}

// rest = mean: before the first tile. A row's sum is one lane's, of the four that have the row.
template <typename C>
__device__ __forceinline__ void clear_rest(FullItem& item) {
  if ((own_thread() & 3) == 0) item.rest[own_row<C>()] = item.rest[own_row<C>() + 8] = 0;
}

// A lane's two rows of 16, of which `row` is the first.
__device__ __forceinline__ OwnRows own_rows(const RowsItem& item, int row) {
  const tile::GroupRows& group = item.group;
  const auto position = [&](int r) { return item.row_begin + group.position(r); };
  const auto head = [&](int r) { return item.head + min(group.head(r), group.heads - 1); };
  const auto exists = [&](int r) { return position(r) < item.rows && group.exists(r); };
  return {min(position(row), item.rows - 1),
          min(position(row + 8), item.rows - 1),
          head(row),
          head(row + 8),
          exists(row),
          exists(row + 8)};
}

}  // namespace dspattn::cuda::general
