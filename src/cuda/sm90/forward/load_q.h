// The producer's warp that loads Q: takes the items, from the walk or from a schedule (tile/schedule.h), and describes
// them to the others.
#pragma once

#include <cstdint>

#include "cuda/blocks/scores16.h"
#include "cuda/blocks/tma_tiles.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/forward/shared.h"

namespace dspattn::cuda::sm90 {

// Q of item number `number` of this CTA, but for what goes through the ring, and its description where items differ. Q
// first: it takes longer. After await_description().
template <typename C>
__device__ __forceinline__ void load_q_and_describe(const ForwardParams& params, Shared<C>& shared, const Work& work,
                                                    int number) {
  const int buffer = number % C::kQBuffers;
  const std::uint32_t full = ptx::shared_address(&shared.q_full[buffer]);
  tma_load_q_panels<C>(params.q_map, work.q_row + work.row_begin, work.head, work.batch,
                       ptx::shared_address(shared.q[buffer]), full, C::kQPanelsByRing, C::kPanels - C::kQPanelsByRing);
  if constexpr (!C::kFull) {
    announce<C>(params.work, params.out, params.lse, work, shared.items[number % kItemSlots]);
    ptx::mbarrier_arrive(full);
  }
}

// Multiplies a buffer's Q by 2^-e where it lies; `thread` counts those of the three warps that share it.
template <typename C>
__device__ __forceinline__ void scale_buffer(const ScoreScales& scales, Shared<C>& shared, int buffer, int thread) {
  auto* data = reinterpret_cast<uint4*>(shared.q[buffer]);
#pragma unroll 1
  for (int i = thread; i < C::kTileQBytes / 16; i += 32 * C::kScalingWarps) {
    const uint4 x = data[i];
    data[i] = make_uint4(multiply_pairs<C>(x.x, scales.q_scale), multiply_pairs<C>(x.y, scales.q_scale),
                         multiply_pairs<C>(x.z, scales.q_scale), multiply_pairs<C>(x.w, scales.q_scale));
  }
  ptx::fence_async_proxy();  // the tensor core reads it
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.q_scaled[buffer]));
}

// Multiplies item number `number`'s Q by 2^-e where it lies in shared memory. By the warps after the first.
template <typename C>
__device__ __forceinline__ void scale_q(const ScoreScales& scales, Shared<C>& shared, int number) {
  const int buffer = number % C::kQBuffers;
  ptx::mbarrier_wait(ptx::shared_address(&shared.q_full[buffer]), number / C::kQBuffers & 1);
  scale_buffer<C>(scales, shared, buffer, static_cast<int>(threadIdx.x) - 32);
}

// Item `index` of the schedule.
template <typename C>
__device__ __forceinline__ void describe_scheduled(const WorkParams& params, int index, Work& work) {
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
  const tile::ItemIndex item = pairs != 0
                                   ? tile::pair_item_of_sequence(rank, row_tiles, params.heads.value, pair_rank(pairs))
                                   : tile::item_of_sequence(0, rank, row_tiles, params.heads.value, section);
  if constexpr (C::kPairs) {
    const auto kv_head = [&](int second) {
      const auto half = tile::pair_item_of_sequence(rank, row_tiles, params.heads.value, second);
      return params.heads_per_kv_head.quotient(half.sequence_head);
    };
    work.common = pairs != 0 && kv_head(0) == kv_head(1) ? 1 : 0;
  }
  work.head = item.sequence_head;
  work.row_begin = item.row_tile * C::kTileQ;
  describe_keys<C>(params, n_k, work);
}

// Who loads the item's last key block, if it has fewer than 128 keys. TMA can read past the end of a sequence, but
// not past the end of the tensors.
__device__ __forceinline__ Tail tail_of(const ForwardParams& params, const Work& work) {
  if (work.blocks.end <= work.blocks.begin || work.blocks.end * tile::kBlockKeys <= work.band.key_length) {
    return Tail::none;
  }
  const int kv_head = params.work.heads_per_kv_head.quotient(work.head);
  const int last = work.k_row + work.blocks.end * tile::kBlockKeys - 1;
  const auto past = [&](const RowsView& tensor, std::int64_t last_element) {
    return tensor.offset(work.batch, kv_head, last) > last_element;
  };
  return past(params.k, params.last_k) || past(params.v, params.last_v) ? Tail::by_threads : Tail::by_tma;
}

// The CTA's items, one after the other. Where pairs take them from a schedule, the first CTA's warp asks and tells
// the second one's.
template <typename C>
struct ItemSource {
  const ForwardParams& params;
  Shared<C>& shared;
  int next_item;  // round of the walk, or item of the schedule
  int told_parity = 0;

  __device__ __forceinline__ ItemSource(const ForwardParams& p, Shared<C>& s)
      : params(p),
        shared(s),
        next_item(p.work.schedule != nullptr ? static_cast<int>(blockIdx.x) >> (C::kPairs ? p.work.pairs : 0) : 0) {}

  __device__ __forceinline__ bool hears() const { return C::kPairs && pair_rank(params.work.pairs) != 0; }

  // After an item's Q was asked for: the next one is known by then.
  __device__ __forceinline__ void tell() {
    if constexpr (C::kPairs) {
      if (params.work.pairs == 0 || params.work.schedule == nullptr) return;
      const std::uint32_t told = ptx::shared_address(&shared.message.told);
      const std::uint32_t heard = ptx::shared_address(&shared.message.heard);
      const std::uint32_t item = ptx::shared_address(&shared.message.item);
      const bool leads = threadIdx.x % 32 == 0;
      if (hears()) {
        if (leads) ptx::mbarrier_arrive_expect(told, 4);
        ptx::mbarrier_wait(told, told_parity);
        next_item = static_cast<int>(ptx::load_shared(item));
        __syncwarp();
        if (leads)
          ptx::mbarrier_arrive_at(heard + (static_cast<std::uint32_t>(next_item) & params.scales.opaque_zero), 0);
      } else {
        ptx::mbarrier_wait(heard, told_parity ^ 1);
        __syncwarp();  // every lane has seen it: what follows completes the next phase
        if (leads) ptx::store_async_at(item, static_cast<std::uint32_t>(next_item), told, 1);
      }
      __syncwarp();
      told_parity ^= 1;
    }
  }

  // For a whole warp. False after the last.
  __device__ __forceinline__ bool next(Work& work) {
    if (params.work.schedule != nullptr) {
      next_item = __shfl_sync(~0u, next_item, 0);  // as the lane knows it that asked
      const int pairs = C::kPairs ? params.work.pairs : 0;
      if (next_item >= params.work.schedule->entries * params.work.heads.value >> pairs) return false;
      describe_scheduled<C>(params.work, next_item, work);
      // The next item is asked for now: the answer takes a while.
      if (threadIdx.x % 32 == 0 && !hears()) {
        next_item = (static_cast<int>(gridDim.x) >> pairs) + atomicAdd(&params.work.schedule->taken, 1);
      }
    } else {
      do {
        if (next_item >= params.work.order.rounds) return false;
      } while (!describe_item<C>(params.work, next_item++, work));
    }
    work.tail = tail_of(params, work);
    return true;
  }
};

// The means of item number `number`, when its Q has been asked for: this waits for the item before to end.
template <typename C>
__device__ __forceinline__ void load_means(const ForwardParams& params, Shared<C>& shared, const Work& work, int number) {
  if constexpr (kStagesMeans<C>) {
    if (ptx::elect()) shared.means.load(params.means, work, C::kTileQ, number);
    __syncwarp();
  }
}

// Loads the items' Q and tells the others about them.
template <typename C>
__device__ __forceinline__ void load_queries(const ForwardParams& params, Shared<C>& shared) {
  ItemSource<C> items(params, shared);
  int number = 0;  // of the CTA's items so far, modulo 4
  const auto described = [&] { return ptx::shared_address(&shared.described[number % C::kQBuffers]); };
  Work work;
#pragma unroll 1
  while (items.next(work)) {
    await_description<C>(shared, number);
    if (ptx::elect()) {
      load_q_and_describe<C>(params, shared, work, number);
      ptx::mbarrier_arrive(described());
    }
    __syncwarp();
    items.tell();
    if constexpr (!C::kQInRegisters) scale_q<C>(params.scales, shared, number);
    load_means<C>(params, shared, work, number);
    number = (number + 1) & 3;
  }
  if (ptx::elect()) {
    announce_end<C>(shared, number);
    ptx::mbarrier_arrive(described());
  }
  __syncwarp();
  if constexpr (!C::kQInRegisters) scale_q<C>(params.scales, shared, number);
}

}  // namespace dspattn::cuda::sm90
