// The producer of the fused kernel where sequences may end within a block of 128 keys: packed batches, key lengths,
// lengths that are no multiple of 128.
//
// One warp takes the items, from a schedule (tile/schedule.h) where there is one, brings their Q and describes them to
// the others: those that bring K and V, and assistants (assistant.h).
//
// Pairs of thread blocks share K and V as in stream.h. Of a last block of keys each completes its own copy.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused/store.h"
#include "cuda/sm90/fused/stream.h"
#include "cuda/sm90/fused/work.h"

namespace dspattn::cuda::sm90 {

// Item `index` of the schedule.
template <typename C>
__device__ __forceinline__ void describe_scheduled(const FusedParams& params, int index, Work& work) {
  const int pairs = C::kPairs ? params.pairs : 0;  // have half as many items
  const auto* entries = reinterpret_cast<const tile::ScheduleEntry*>(params.schedule + 1);
  const tile::ScheduleEntry entry = entries[params.heads.quotient(index << pairs)];
  const int rank = index - (entry.first * params.heads.value >> pairs);
  const int n_k = describe_sequence(params, entry.sequence, work);
  const int row_tiles = (min(work.rows, params.n_q) + C::kTileQ - 1) / C::kTileQ;
  const bool diagonal = params.left != tile::kMaxRows || params.right != tile::kMaxRows;
  const int section = diagonal ? tile::section_heads_of(row_tiles, params.heads.value, params.heads_per_kv_head.value,
                                                        static_cast<int>(gridDim.x))
                               : 0;
  const tile::ItemPlace place = pairs != 0
                                    ? tile::pair_item_of_sequence(rank, row_tiles, params.heads.value, pair_rank(pairs))
                                    : tile::item_of_sequence(0, rank, row_tiles, params.heads.value, section);
  if constexpr (C::kPairs) {
    const auto kv_head = [&](int second) {
      const auto of = tile::pair_item_of_sequence(rank, row_tiles, params.heads.value, second);
      return params.heads_per_kv_head.quotient(of.sequence_head);
    };
    work.common = pairs != 0 && kv_head(0) == kv_head(1) ? 1 : 0;
  }
  work.head = place.sequence_head;
  work.row_begin = place.row_tile * C::kTileQ;
  describe_keys<C>(params, n_k, work);
}

// Who loads the item's last block, if it has fewer than 128 keys. The engine can read past the end of a sequence, but
// not past the end of the tensors.
__device__ __forceinline__ Tail tail_of(const FusedParams& params, const Work& work) {
  if (work.blocks.end <= work.blocks.begin || work.blocks.end * tile::kBlockKeys <= work.band.key_length) {
    return Tail::none;
  }
  const int kv_head = params.heads_per_kv_head.quotient(work.head);
  const int last = work.k_row + work.blocks.end * tile::kBlockKeys - 1;
  const auto past = [&](const Rows& tensor, std::int64_t last_element) {
    return work.batch * tensor.batch_stride + kv_head * tensor.head_stride + last * tensor.row_stride > last_element;
  };
  return past(params.k, params.last_k) || past(params.v, params.last_v) ? Tail::by_threads : Tail::by_engine;
}

// The thread block's items, one after the other. Where pairs take them from a schedule, the first block's warp asks and
// tells the second one's.
template <typename C>
struct Items {
  const FusedParams& params;
  Shared<C>& shared;
  int turn;  // of the walk, or item of the schedule
  int told_parity = 0;

  __device__ __forceinline__ Items(const FusedParams& p, Shared<C>& s)
      : params(p),
        shared(s),
        turn(p.schedule != nullptr ? static_cast<int>(blockIdx.x) >> (C::kPairs ? p.pairs : 0) : 0) {}

  __device__ __forceinline__ bool hears() const { return C::kPairs && pair_rank(params.pairs) != 0; }

  // After an item's Q was asked for: the next one is known by then.
  __device__ __forceinline__ void tell() {
    if constexpr (C::kPairs) {
      if (params.pairs == 0 || params.schedule == nullptr) return;
      const std::uint32_t told = ptx::shared_address(&shared.turn.told);
      const std::uint32_t heard = ptx::shared_address(&shared.turn.heard);
      const std::uint32_t item = ptx::shared_address(&shared.turn.item);
      const bool leads = threadIdx.x % 32 == 0;
      if (hears()) {
        if (leads) ptx::mbarrier_arrive_expect(told, 4);
        ptx::mbarrier_wait(told, told_parity);
        turn = static_cast<int>(ptx::load_shared(item));
        __syncwarp();
        if (leads) ptx::mbarrier_arrive_at(heard + (static_cast<std::uint32_t>(turn) & params.zero), 0);
      } else {
        ptx::mbarrier_wait(heard, told_parity ^ 1);
        __syncwarp();  // every lane has seen it: what follows completes the next phase
        if (leads) ptx::store_async_at(item, static_cast<std::uint32_t>(turn), told, 1);
      }
      __syncwarp();
      told_parity ^= 1;
    }
  }

  // For a whole warp. False after the last.
  __device__ __forceinline__ bool next(Work& work) {
    if (params.schedule != nullptr) {
      turn = __shfl_sync(~0u, turn, 0);  // as the lane knows it that asked
      const int pairs = C::kPairs ? params.pairs : 0;
      if (turn >= params.schedule->entries * params.heads.value >> pairs) return false;
      describe_scheduled<C>(params, turn, work);
      // The next item is asked for now: the answer takes a while.
      if (threadIdx.x % 32 == 0 && !hears()) {
        turn = (static_cast<int>(gridDim.x) >> pairs) + atomicAdd(&params.schedule->taken, 1);
      }
    } else {
      do {
        if (turn >= params.order.turns) return false;
      } while (!describe_item<C>(params, turn++, work));
    }
    work.tail = tail_of(params, work);
    return true;
  }
};

// Brings the items' Q and tells the others about them.
template <typename C>
__device__ __forceinline__ void bring_queries(const FusedParams& params, Shared<C>& shared) {
  Items<C> items(params, shared);
  int number = 0;  // of the block's items so far, modulo 4
  const auto described = [&] { return ptx::shared_address(&shared.described[number % C::kQBuffers]); };
  Work work;
#pragma unroll 1
  while (items.next(work)) {
    await_description<C>(shared, number);
    if (ptx::elect()) {
      load_q_by_engine<C>(params, shared, work, number);
      ptx::mbarrier_arrive(described());
    }
    __syncwarp();
    items.tell();
    if constexpr (!C::kQInRegisters) scale_q<C>(params, shared, number);
    number = (number + 1) & 3;
  }
  if (ptx::elect()) {
    announce_end<C>(shared, number);
    ptx::mbarrier_arrive(described());
  }
  __syncwarp();
  if constexpr (!C::kQInRegisters) scale_q<C>(params, shared, number);
}

// Brings the items' keys, values, or both (see stream.h). Of a last block that is not whole, the assistants complete or
// bring what this leaves.
template <typename C>
__device__ __forceinline__ void bring_tiles(const FusedParams& params, Shared<C>& shared, Kind first, Kind last) {
  const bool pairs = C::kPairs && params.pairs != 0;
  const int stages = stages_of<C>(params);
  const Addresses<C> address(shared);
  auto rank = static_cast<std::uint32_t>(pair_rank(1));
  ptx::pin(rank);
  Ring<C::kStages> ring;
#pragma unroll 1
  for (int number = 0;; number = (number + 1) & 3) {
    const int buffer = number % C::kQBuffers;
    ptx::mbarrier_wait(address(shared.described[buffer]), number / C::kQBuffers & 1);
    const Item<C::kConsumers>& item = shared.items[number % kItemSlots];
    const bool valid = uniform(item.valid) != 0;
    const int tiles = uniform(item.entries) - C::kQEntries;
    const int begin = uniform(item.k_row + item.first_block * tile::kBlockKeys);
    const int batch = uniform(item.batch);
    const int head = uniform(item.head);
    const bool common = pairs && uniform(item.common) != 0;
    const int q_row = C::kQEntries > 0 ? uniform(item.out_row) : 0;  // the output's rows are those of Q
    const auto item_tail = static_cast<Tail>(uniform(static_cast<int>(item.tail)));
    if (!valid) return;
    if (ptx::elect()) ptx::mbarrier_arrive(address(shared.q_empty[buffer]));  // every lane has read it
    __syncwarp();
    const int kv_head = params.heads_per_kv_head.quotient(head);
    const int step = block_step<C>(params);
#pragma unroll 1
    for (int i = -C::kQEntries; i < tiles; ++i) {
      const bool in_tail = i >= 0 && (descends<C>(params) ? i < C::kTilesPerBlock : i >= tiles - C::kTilesPerBlock);
      const Tail tail = in_tail ? item_tail : Tail::none;
      const int row = begin + i / C::kTilesPerBlock * step + i % C::kTilesPerBlock * params.keys.part_step;
      const auto stage = static_cast<std::uint32_t>(ring.stage);
#pragma unroll 1
      for (int kind = first; kind <= last; ++kind) {
        const bool keys = kind == kKeys;
        const std::uint32_t place = (keys ? address(shared.k) : address(shared.v)) + stage * C::kTileKBytes;
        const std::uint32_t full = (keys                 ? address(shared.k_full)
                                    : tail == Tail::none ? address(shared.v_full)
                                                         : address(shared.tail_begun)) +
                                   8 * stage;
        ptx::mbarrier_wait((keys ? address(shared.k_empty) : address(shared.v_empty)) + 8 * stage, ring.parity ^ 1);
        if (pairs) {  // what is to be filled is free in the other block, too
          const std::uint32_t peer = (keys ? address(shared.k_peer_empty) : address(shared.v_peer_empty)) + 8 * stage;
          if (ptx::elect()) ptx::mbarrier_arrive_at(peer, rank ^ 1);
          ptx::mbarrier_wait(peer, ring.parity);
        }
        if (ptx::elect()) {
          if (C::kQEntries > 0 && i < 0) {
            load_q_entry<C>(params, q_row, head, batch, place, full, keys);
          } else if (tail != Tail::by_threads && common) {
            load_half_for_both<C>(params, place, full, keys, row, kv_head, batch, static_cast<int>(rank));
          } else if (tail != Tail::by_threads) {
            load_tile_by_engine<C>(params, place, full, keys, row, kv_head, batch);
          } else if (!keys) {
            ptx::mbarrier_arrive(full);  // the consumers have left the stage's V, and its K before that
          }
        }
        __syncwarp();
      }
      ring.advance(stages);
    }
  }
}

}  // namespace dspattn::cuda::sm90
