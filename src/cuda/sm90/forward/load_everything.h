// The general variant's producer: all 128 threads walk the items and load Q, K, V and masks. One thread asks TMA; what
// TMA cannot load (a partial key block, whose absent keys must be zeros, and tensors it cannot address) all threads
// copy with predicated loads, zero-filled.
#pragma once

#include <cstdint>

#include "cuda/blocks/mask_load.h"
#include "cuda/blocks/thread_copy.h"
#include "cuda/blocks/tma_tiles.h"
#include "cuda/ptx/barrier.h"
#include "cuda/sm90/forward/load_q.h"
#include "cuda/sm90/forward/shared.h"

namespace dspattn::cuda::sm90 {

// Before a copy by all threads: waits until the consumers have left the stage. The threads that do not ask TMA run
// ahead of the one that does, so they first wait for it to get here: a parity tells only neighbouring uses of a stage
// apart.
__device__ __forceinline__ void begin_copy(std::uint32_t empty, int parity) {
  ptx::named_barrier_sync(barrier_number(NamedBarrier::producer), 128);
  ptx::mbarrier_wait(empty, parity ^ 1);
}

// After copy_rows: all of the producer's writes, then one arrival for the consumers.
__device__ __forceinline__ void publish_copy(std::uint32_t full) {
  ptx::copy_async_wait();
  ptx::fence_async_proxy();
  ptx::named_barrier_sync(barrier_number(NamedBarrier::producer), 128);
  if (threadIdx.x == 0) ptx::mbarrier_arrive(full);
}

// Q of item number `number` of this block, and its description.
template <typename C>
__device__ __forceinline__ void load_q(const ForwardParams& params, Shared<C>& shared, const Work& work, int number) {
  const int buffer = number % C::kQBuffers;
  const int parity = number / C::kQBuffers & 1;
  if (params.tma_q != 0) {
    if (threadIdx.x != 0) return;
    await_description<C>(shared, number);
    load_q_and_describe<C>(params, shared, work, number);
    return;
  }
  begin_copy(ptx::shared_address(&shared.q_empty[buffer]), parity);
  if (threadIdx.x == 0) {
    announce<C>(params.work, params.out, params.lse, work, shared.items[number % kItemSlots]);
    ptx::mbarrier_arrive(ptx::shared_address(&shared.q_full[buffer]));
  }
  const std::int64_t offset = params.q.offset(work.batch, work.head, work.q_row + work.row_begin);
  const int rows = work.rows - work.row_begin;
  copy_rows(ptx::shared_address(shared.q[buffer]), params.q, offset, C::kTileQ, C::kPanels, params.d, params.vector_q,
            [&](int row) { return row < rows ? row : -1; });
  publish_copy(ptx::shared_address(&shared.q_full[buffer]));
}

// One K or V tile.
template <typename C, typename SourceRow>
__device__ __forceinline__ void load_tile(const ForwardParams& params, std::uint32_t tile, std::uint32_t full,
                                          std::uint32_t empty, int parity, bool by_tma, bool keys, int row,
                                          int part_rows, int kv_head, int batch, SourceRow source_row) {
  if (by_tma) {
    if (threadIdx.x != 0) return;
    ptx::mbarrier_wait(empty, parity ^ 1);
    tma_load_tile<C>({params.k_map, params.v_map, params.keys.half_step}, tile, full, keys, row + part_rows, kv_head,
                     batch);
    return;
  }
  begin_copy(empty, parity);
  const RowsView& source = keys ? params.k : params.v;
  const std::int64_t offset = source.offset(batch, kv_head, row);
  copy_rows(tile, source, offset, C::kTileK, C::kPanels, keys ? params.d : params.out.columns,
            keys ? params.vector_k : params.vector_v, source_row);
  publish_copy(full);
}

// All 128 threads go through the items.
template <typename C>
__device__ __forceinline__ void load_everything(const ForwardParams& params, Shared<C>& shared) {
  Ring<C::kStages> ring;
  const std::uint32_t k_full = ptx::shared_address(shared.k_full);
  const std::uint32_t k_empty = ptx::shared_address(shared.k_empty);
  const std::uint32_t v_full = ptx::shared_address(shared.v_full);
  const std::uint32_t v_empty = ptx::shared_address(shared.v_empty);
  // Round (bits 2 and up) and number of the CTA's items so far, modulo 4 (bits 0 and 1), in one register.
  static_assert(kItemSlots == 4 && 4 % (2 * C::kQBuffers) == 0,
                "slot, buffer and parity follow from the number modulo 4");
  int walk = 0;
  int tiles = 0;  // so far
#pragma unroll 1
  for (; walk >> 2 < params.work.order.rounds; walk += 4) {
    Work work;
    if (!describe_item<C>(params.work, walk >> 2, work)) continue;
    load_q<C>(params, shared, work, walk & 3);
    if (threadIdx.x >= 32) scale_q<C>(params.scales, shared, walk & 3);
    walk = (walk & ~3) | ((walk + 1) & 3);
    const int kv_head = params.work.heads_per_kv_head.quotient(work.head);
    const int batch = work.batch;
    const int step = block_step<C>(params.work);
    int key = first_block<C>(params.work, work) * tile::kBlockKeys;  // the block's first
#pragma unroll 1
    for (int i = 0, part = 0; i < (work.blocks.end - work.blocks.begin) * C::kTilesPerBlock; ++i) {
      const int row = work.k_row + key;
      const int present = work.band.key_length - key;  // from there on
      const bool whole = present >= tile::kBlockKeys;
      const std::uint32_t at = 8u * static_cast<std::uint32_t>(ring.stage);
      const bool tma_k = whole && params.tma_k != 0;
      const bool tma_v = whole && params.tma_v != 0;
      const auto visible = [&](tile::Slot slot) {
        const int key = params.keys.key(part, slot.group, slot.element);
        return key < present ? key : -1;
      };
      load_tile<C>(params, ptx::shared_address(shared.k[ring.stage]), k_full + at, k_empty + at, ring.parity, tma_k,
                   true, row, part * params.keys.part_step, kv_head, batch,
                   [&](int r) { return visible(tile::slot_of_k_row(r, C::kTileK)); });
      load_tile<C>(params, ptx::shared_address(shared.v[ring.stage]), v_full + at, v_empty + at, ring.parity, tma_v,
                   false, row, part * params.keys.part_step, kv_head, batch,
                   [&](int r) { return visible(tile::slot_of_v_row(r)); });
      if (params.masks.bytes != 0 && threadIdx.x >= 32) {
        load_mask_blocks<C>(params.masks, shared.mask, work, key, present, tiles++);
      }
      __syncwarp();  // the driving thread's warp stays together: its other lanes must not run ahead of it
      ring.advance();
      if (++part == C::kTilesPerBlock) {
        part = 0;
        key += step;
      }
    }
  }
  if (threadIdx.x >= 32) scale_q<C>(params.scales, shared, walk & 3);
  if (threadIdx.x == 0) announce_end<C>(shared, walk & 3);
}

}  // namespace dspattn::cuda::sm90
