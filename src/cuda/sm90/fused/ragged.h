// The producer of the fused kernel where sequences may end within a block of 128 keys: packed batches, key lengths,
// lengths that are no multiple of 128.
//
// One warp drives the copy engine and takes the items, from a schedule (tile/schedule.h) where there is one; three
// others assist it (assistant.h).
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/sm90/fused/assistant.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/params.h"
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

// Drives the copy engine through the thread block's items. One warp does, and one of its lanes asks (see stream.h).
template <typename C>
__device__ __forceinline__ void drive(const FusedParams& params, Shared<C>& shared) {
  Ring<C::kStages> ring;
  const int stages = stages_of<C>(params);
  const Addresses<C> address(shared);
  int number = 0;  // of the block's items so far, modulo 4
  const bool scheduled = params.schedule != nullptr;
  int turn = scheduled ? static_cast<int>(blockIdx.x) : 0;  // of the walk, or item of the schedule
  const auto turns = [&] { return scheduled ? params.schedule->entries * params.heads.value : params.order.turns; };
#pragma unroll 1
  while (turn < turns()) {
    Work work;
    if (scheduled) {
      describe_scheduled<C>(params, turn, work);
    } else if (!describe_item<C>(params, turn, work)) {
      ++turn;
      continue;
    }
    work.tail = tail_of(params, work);
    ++turn;
    // The next item is asked for now: the answer takes a while.
    if (scheduled && threadIdx.x == 0) turn = static_cast<int>(gridDim.x) + atomicAdd(&params.schedule->taken, 1);
    const int kv_head = params.heads_per_kv_head.quotient(work.head);
    // The next entry of the ring: tiles that begin at `row`, or what comes of Q.
    const auto bring = [&](bool queries, int row, Tail tail) {
      const auto stage = static_cast<std::uint32_t>(ring.stage);
#pragma unroll 1
      for (int kind = kKeys; kind <= kValues; ++kind) {
        const bool keys = kind == kKeys;
        const std::uint32_t place = (keys ? address(shared.k) : address(shared.v)) + stage * C::kTileKBytes;
        const std::uint32_t full = (keys                 ? address(shared.k_full)
                                    : tail == Tail::none ? address(shared.v_full)
                                                         : address(shared.tail_begun)) +
                                   8 * stage;
        ptx::mbarrier_wait((keys ? address(shared.k_empty) : address(shared.v_empty)) + 8 * stage, ring.parity ^ 1);
        if (ptx::elect()) {
          if (queries) {
            load_q_entry<C>(params, work, place, full, keys);
          } else if (tail != Tail::by_threads) {
            load_tile_by_engine<C>(params, place, full, keys, row, kv_head, work.batch);
          } else if (!keys) {
            ptx::mbarrier_arrive(full);
          }
        }
        __syncwarp();
      }
      ring.advance(stages);
    };
    if constexpr (C::kQEntries > 0) bring(true, 0, Tail::none);
    await_description<C>(shared, number);
    if (ptx::elect()) load_q_by_engine<C>(params, shared, work, number);
    __syncwarp();
    number = (number + 1) & 3;
    int row = work.k_row + work.blocks.begin * tile::kBlockKeys;  // of the block's first key
    int part = 0;
#pragma unroll 1
    for (int left = (work.blocks.end - work.blocks.begin) * C::kTilesPerBlock; left > 0; --left) {
      bring(false, row + part * params.keys.part_step, left <= C::kTilesPerBlock ? work.tail : Tail::none);
      if (++part == C::kTilesPerBlock) {
        part = 0;
        row += tile::kBlockKeys;
      }
    }
    turn = __shfl_sync(~0u, turn, 0);  // as the lane knows it that asked
  }
  if (ptx::elect()) announce_end<C>(shared, number);
}

template <typename C>
__device__ __forceinline__ void produce_ragged(const FusedParams& params, Shared<C>& shared) {
  if (threadIdx.x < 32) {
    drive<C>(params, shared);
  } else {
    Assistant<C>{params, shared}.run();
  }
}

}  // namespace dspattn::cuda::sm90
