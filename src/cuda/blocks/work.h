// What a producer knows of an item: which rows, which keys, who loads them; and how it tells the others.
#pragma once

#include <cstdint>

#include "cuda/blocks/item.h"
#include "cuda/blocks/views.h"
#include "cuda/blocks/work_params.h"
#include "cuda/ptx/barrier.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::blocks {

// An item as the producer needs it.
struct Work {
  int row_begin, rows;  // first query row, and rows of the sequence
  int q_row, k_row;     // rows of the tensors that hold the sequence's row 0
  int batch, sequence, head;
  tile::RowBand band;
  tile::KeyBlockRange blocks;  // key blocks that any row of the item sees
  Tail tail = Tail::none;
  int common = 1;  // pairs: both CTAs' keys are the same
};

// Where the sequence lies; returns its number of keys. kLengths: only the device may know its lengths.
template <bool kLengths = true>
__device__ __forceinline__ int describe_sequence(const WorkParams& params, int sequence, Work& work) {
  work.sequence = sequence;
  work.rows = params.n_q;
  work.q_row = 0;
  work.batch = sequence;
  work.k_row = 0;
  if (!kLengths || !params.cumulative_q.present()) return params.n_k;
  work.batch = 0;
  const tile::RowSpan queries = tile::packed_span(params.cumulative_q, sequence, params.q_rows, params.n_q);
  const tile::RowSpan keys = tile::packed_span(params.cumulative_k, sequence, params.k_rows, params.n_k);
  work.q_row = queries.begin;
  work.rows = queries.count;
  work.k_row = keys.begin;
  return keys.count;
}

// Which keys the item's rows see, of n_k.
template <typename C, bool kLengths = true>
__device__ __forceinline__ void describe_keys(const WorkParams& params, int n_k, Work& work) {
  const int key_length = kLengths ? tile::visible_keys(params.key_lengths, work.sequence, n_k) : n_k;
  work.band = {params.left, params.right, params.offset + (params.bottom_right != 0 ? n_k - work.rows : 0), key_length};
  const int tile_q = C::kTileQ << (C::kPairs ? params.pairs : 0);
  const int last = work.row_begin + tile_q < work.rows ? work.row_begin + tile_q - 1 : work.rows - 1;
  work.blocks = tile::visible_key_blocks(work.band, work.row_begin, last);
}

// Which of a pair this CTA is.
__device__ __forceinline__ int pair_rank(int pairs) { return static_cast<int>(blockIdx.x) & pairs; }

// False when there is none in this round, or it lies past the end of its (packed) sequence. Without kLengths there is
// less code to fetch, which short problems wait for.
template <typename C, bool kLengths = true>
__device__ __forceinline__ bool describe_item(const WorkParams& params, int round, Work& work) {
  const int pairs = C::kPairs ? params.pairs : 0;
  const tile::ItemIndex index =
      tile::item_of_round<C::kShortLast>(params.order, round, static_cast<int>(blockIdx.x) >> pairs);
  if (index.row_tile < 0) return false;
  const int sequence = params.heads.quotient(index.sequence_head);
  const int n_k = describe_sequence<kLengths>(params, sequence, work);
  work.head = index.sequence_head - sequence * params.heads.value;
  work.row_begin = index.row_tile * (C::kTileQ << pairs);
  if (kLengths && work.row_begin >= work.rows) return false;
  describe_keys<C, kLengths>(params, n_k, work);
  // A pair's CTAs take the first half of the rows alternately: under a causal mask that is the cheaper one. Its rows
  // may lie past the end: then this CTA only loads its share of keys.
  work.row_begin += ((pair_rank(pairs) ^ round) & pairs) * C::kTileQ;
  return true;
}

// The key block that is loaded first, and the step from one to the next, in keys.
template <typename C>
__device__ __forceinline__ bool descends(const WorkParams& params) {
  return C::kMayDescend && params.descending != 0;
}
template <typename C>
__device__ __forceinline__ int first_block(const WorkParams& params, const Work& work) {
  return descends<C>(params) ? work.blocks.end - 1 : work.blocks.begin;
}
template <typename C>
__device__ __forceinline__ int block_step(const WorkParams& params) {
  return descends<C>(params) ? -tile::kBlockKeys : tile::kBlockKeys;
}

// Writes the consumers' description; one thread does it for all.
template <typename C>
__device__ __forceinline__ void announce(const WorkParams& params, const OutView& out, const LseView& lse,
                                         const Work& work, Item<C::kConsumers>& item) {
  item.valid = 1;
  item.row_begin = work.row_begin;
  item.rows = work.rows;
  item.batch = work.batch;
  item.out_row = work.q_row + work.row_begin;
  item.sequence = work.sequence;
  item.head = work.head;
  item.diagonal = work.band.diagonal;
  item.key_length = work.band.key_length;
  const std::int64_t row = work.q_row + work.row_begin;
  item.out_offset = out.offset(work.batch, work.head, row);
  item.lse_offset = lse.offset(work.batch, work.head, row);
#pragma unroll 1
  for (int i = 0; i < C::kConsumers; ++i) {
    const int first = work.row_begin + i * 64;
    const int last = first + 63 < work.rows ? first + 63 : work.rows - 1;
    const tile::KeyBlockRange own = tile::visible_key_blocks(work.band, first, last);
    const tile::KeyBlockRange interior = tile::interior_key_blocks(work.band, first, last);
    const bool any = own.end > own.begin;
    const bool down = descends<C>(params);
    const auto in_load_order = [&](const tile::KeyBlockRange& range) {
      return down ? tile::KeyBlockRange{work.blocks.end - range.end, work.blocks.end - range.begin}
                  : tile::KeyBlockRange{range.begin - work.blocks.begin, range.end - work.blocks.begin};
    };
    const tile::KeyBlockRange visible = in_load_order(own);
    const tile::KeyBlockRange unmasked = in_load_order(interior);
    const int blocks = work.blocks.end - work.blocks.begin;
    Share& share = item.shares[i];
    share.begin = any ? visible.begin * C::kTilesPerBlock : 0;
    share.end = any ? visible.end * C::kTilesPerBlock : 0;
    share.interior_begin = unmasked.begin;
    share.interior_end = unmasked.end;
    share.skip_before = any ? share.begin : blocks * C::kTilesPerBlock + C::kQEntries;
    share.skip_after = any ? (blocks - visible.end) * C::kTilesPerBlock : 0;
  }
  item.tail = work.tail;
  item.entries = C::kQEntries + (work.blocks.end - work.blocks.begin) * C::kTilesPerBlock;
  item.k_row = work.k_row;
  item.first_block = first_block<C>(params, work);
  if constexpr (C::kPairs) item.common = static_cast<std::int16_t>(work.common);
}

// After the last item: consumers read valid == 0.
template <typename C, typename Shared>
__device__ __forceinline__ void announce_end(Shared& shared, int number) {
  const int buffer = number % C::kQBuffers;
  ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[buffer]), (number / C::kQBuffers & 1) ^ 1);
  shared.items[number % kItemSlots].valid = 0;
  for (int i = 0; i < C::kQArrivals; ++i) ptx::mbarrier_arrive(ptx::shared_address(&shared.q_full[buffer]));
}

// Waits until the buffer of item number `number`'s Q and its description are free.
template <typename C, typename Shared>
__device__ __forceinline__ void await_description(Shared& shared, int number) {
  ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[number % C::kQBuffers]), (number / C::kQBuffers & 1) ^ 1);
}

}  // namespace dspattn::cuda::blocks
