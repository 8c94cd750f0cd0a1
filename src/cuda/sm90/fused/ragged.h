// The producer of the fused kernel where sequences may end within a block of 128 keys: packed batches, key lengths,
// lengths that are no multiple of 128.
//
// One warp takes the items, from a schedule (tile/schedule.h) where there is one, brings their Q and describes them to
// the others: those that bring K and V, and assistants (assistant.h).
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
  const auto* entries = reinterpret_cast<const tile::ScheduleEntry*>(params.schedule + 1);
  const tile::ScheduleEntry entry = entries[params.heads.quotient(index)];
  const int n_k = describe_sequence(params, entry.sequence, work);
  const int row_tiles = (min(work.rows, params.n_q) + C::kTileQ - 1) / C::kTileQ;
  const bool diagonal = params.left != tile::kMaxRows || params.right != tile::kMaxRows;
  const int section = diagonal ? tile::section_heads_of(row_tiles, params.heads.value, params.heads_per_kv_head.value,
                                                        static_cast<int>(gridDim.x))
                               : 0;
  const tile::ItemPlace place =
      tile::item_of_sequence(0, index - entry.first * params.heads.value, row_tiles, params.heads.value, section);
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

// The thread block's items, one after the other.
template <typename C>
struct Items {
  const FusedParams& params;
  int turn;  // of the walk, or item of the schedule

  __device__ __forceinline__ explicit Items(const FusedParams& p)
      : params(p), turn(p.schedule != nullptr ? static_cast<int>(blockIdx.x) : 0) {}

  // For a whole warp. False after the last.
  __device__ __forceinline__ bool next(Work& work) {
    if (params.schedule != nullptr) {
      turn = __shfl_sync(~0u, turn, 0);  // as the lane knows it that asked
      if (turn >= params.schedule->entries * params.heads.value) return false;
      describe_scheduled<C>(params, turn, work);
      // The next item is asked for now: the answer takes a while.
      if (threadIdx.x % 32 == 0) turn = static_cast<int>(gridDim.x) + atomicAdd(&params.schedule->taken, 1);
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
  Items<C> items(params);
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
  const int stages = stages_of<C>(params);
  const Addresses<C> address(shared);
  Ring<C::kStages> ring;
#pragma unroll 1
  for (int number = 0;; number = (number + 1) & 3) {
    const int buffer = number % C::kQBuffers;
    ptx::mbarrier_wait(address(shared.described[buffer]), number / C::kQBuffers & 1);
    const Item<C::kConsumers>& item = shared.items[number % kItemSlots];
    const bool valid = uniform(item.valid) != 0;
    const int tiles = uniform(item.entries) - C::kQEntries;
    const int begin = uniform(item.k_begin);
    const int batch = uniform(item.batch);
    const int head = uniform(item.head);
    const int q_row = C::kQEntries > 0 ? uniform(item.out_row) : 0;  // the output's rows are those of Q
    const auto item_tail = static_cast<Tail>(uniform(static_cast<int>(item.tail)));
    if (!valid) return;
    if (ptx::elect()) ptx::mbarrier_arrive(address(shared.q_empty[buffer]));  // every lane has read it
    __syncwarp();
    const int kv_head = params.heads_per_kv_head.quotient(head);
#pragma unroll 1
    for (int i = -C::kQEntries; i < tiles; ++i) {
      const Tail tail = i >= 0 && i >= tiles - C::kTilesPerBlock ? item_tail : Tail::none;
      const int row = begin + i / C::kTilesPerBlock * tile::kBlockKeys + i % C::kTilesPerBlock * params.keys.part_step;
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
        if (ptx::elect()) {
          if (C::kQEntries > 0 && i < 0) {
            load_q_entry<C>(params, q_row, head, batch, place, full, keys);
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
