// The producer warpgroup of the fused kernel: walks the items and their key tiles and fills the stages.
//
// Where the copy engine can do it all, a few warps drive it (stream.h); ragged.h is for sequences that end within a
// block of keys. What is here is the general variant's: what the engine cannot load (a partial block, whose absent keys
// must be zeros, and tensors it cannot address) all 128 threads copy with predicated loads, zero-filled.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/fused/assistant.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/full.h"
#include "cuda/sm90/fused/mask_load.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused/ragged.h"
#include "cuda/sm90/fused/softmax.h"
#include "cuda/sm90/fused/stream.h"
#include "cuda/sm90/fused/work.h"

namespace dspattn::cuda::sm90 {

// Two neighbouring 16-bit elements; columns at and past the end are zero.
__device__ __forceinline__ std::uint32_t load_pair(const std::uint16_t* row, int column, int columns) {
  std::uint32_t pair = 0;
  if (column < columns) pair = row[column];
  if (column + 1 < columns) pair |= static_cast<std::uint32_t>(row[column + 1]) << 16;
  return pair;
}

// Before a copy by all threads: waits until the consumers have left the stage. The threads that do not drive the copy
// engine run ahead of the one that does, so they first wait for it to get here: a parity tells only neighbouring uses
// of a stage apart.
__device__ __forceinline__ void begin_copy(std::uint32_t empty, int parity) {
  ptx::named_barrier_sync(kBarrierProducer, 128);
  ptx::mbarrier_wait(empty, parity ^ 1);
}

// Copies `rows` rows to a swizzled tile; row r comes from source row source_row(r), or is zero when that is negative.
template <typename C, typename SourceRow>
__device__ __forceinline__ void copy_rows(std::uint32_t tile, const Rows& source, std::int64_t offset, int rows,
                                          int panels, int columns, int vector, SourceRow source_row) {
  const auto* base = static_cast<const std::uint16_t*>(source.data) + offset;
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  const int chunk = thread & 7;
#pragma unroll 1
  for (int row = thread >> 3; row < rows; row += 16) {
    const int from = source_row(row);
    const std::uint16_t* source_data = base + (from >= 0 ? from : 0) * source.row_stride;
#pragma unroll 1
    for (int panel = 0; panel < panels; ++panel) {
      const std::uint32_t to =
          tile + static_cast<std::uint32_t>(panel * rows * 128 + tile::swizzled_offset(row, chunk));
      const int column = panel * 64 + chunk * 8;
      if (!C::kGeneral || vector != 0) {  // rows are 16-byte aligned and `columns` a multiple of 8
        const bool inside = from >= 0 && column < columns;
        ptx::copy_async_16(to, inside ? source_data + column : base, inside ? 16 : 0);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; i += 2) {
          ptx::store_shared(to + 2 * static_cast<std::uint32_t>(i),
                            load_pair(source_data, column + i, from >= 0 ? columns : 0));
        }
      }
    }
  }
}

// After copy_rows: all of the producer's writes, then one arrival for the consumers.
__device__ __forceinline__ void publish_copy(std::uint32_t full) {
  ptx::copy_async_wait();
  ptx::fence_async_proxy();
  ptx::named_barrier_sync(kBarrierProducer, 128);
  if (threadIdx.x == 0) ptx::mbarrier_arrive(full);
}

// Q of item number `number` of this block, and its description.
template <typename C>
__device__ __forceinline__ void load_q(const FusedParams& params, Shared<C>& shared, const Work& work, int number) {
  const int buffer = number % C::kQBuffers;
  const int parity = number / C::kQBuffers & 1;
  if (params.copy_engine_q != 0) {
    if (threadIdx.x != 0) return;
    await_description<C>(shared, number);
    load_q_by_engine<C>(params, shared, work, number);
    return;
  }
  begin_copy(ptx::shared_address(&shared.q_empty[buffer]), parity);
  if (threadIdx.x == 0) {
    announce<C>(params, work, shared.items[number % kItemSlots]);
    ptx::mbarrier_arrive(ptx::shared_address(&shared.q_full[buffer]));
  }
  const std::int64_t offset = work.batch * params.q.batch_stride + work.head * params.q.head_stride +
                              (work.q_row + work.row_begin) * params.q.row_stride;
  const int rows = work.rows - work.row_begin;
  copy_rows<C>(ptx::shared_address(shared.q[buffer]), params.q, offset, C::kTileQ, C::kPanels, params.d,
               params.vector_q, [&](int row) { return row < rows ? row : -1; });
  publish_copy(ptx::shared_address(&shared.q_full[buffer]));
}

// One K or V tile.
template <typename C, typename SourceRow>
__device__ __forceinline__ void load_tile(const FusedParams& params, std::uint32_t tile, std::uint32_t full,
                                          std::uint32_t empty, int parity, bool engine, bool keys, int row,
                                          int part_rows, int kv_head, int batch, SourceRow source_row) {
  if (engine) {
    if (threadIdx.x != 0) return;
    ptx::mbarrier_wait(empty, parity ^ 1);
    load_tile_by_engine<C>(params, tile, full, keys, row + part_rows, kv_head, batch);
    return;
  }
  begin_copy(empty, parity);
  const Rows& source = keys ? params.k : params.v;
  const std::int64_t offset = batch * source.batch_stride + kv_head * source.head_stride + row * source.row_stride;
  copy_rows<C>(tile, source, offset, C::kTileK, C::kPanels, keys ? params.d : params.d_v,
               keys ? params.vector_k : params.vector_v, source_row);
  publish_copy(full);
}

// The general variant's walk: all 128 threads go through the items, bring Q, K, V and masks, and copy where the copy
// engine cannot.
template <typename C>
__device__ __forceinline__ void walk_items(const FusedParams& params, Shared<C>& shared) {
  Ring<C::kStages> ring;
  const std::uint32_t k_full = ptx::shared_address(shared.k_full);
  const std::uint32_t k_empty = ptx::shared_address(shared.k_empty);
  const std::uint32_t v_full = ptx::shared_address(shared.v_full);
  const std::uint32_t v_empty = ptx::shared_address(shared.v_empty);
  // Turn (bits 2 and up) and number of the block's items so far, modulo 4 (bits 0 and 1), in one register.
  static_assert(kItemSlots == 4 && 4 % (2 * C::kQBuffers) == 0,
                "slot, buffer and parity follow from the number modulo 4");
  int walk = 0;
  int tiles = 0;  // so far
#pragma unroll 1
  for (; walk >> 2 < params.order.turns; walk += 4) {
    Work work;
    if (!describe_item<C>(params, walk >> 2, work)) continue;
    load_q<C>(params, shared, work, walk & 3);
    if (threadIdx.x >= 32) scale_q<C>(params, shared, walk & 3);
    walk = (walk & ~3) | ((walk + 1) & 3);
    const int kv_head = params.heads_per_kv_head.quotient(work.head);
    const int batch = work.batch;
    const int step = block_step<C>(params);
    int key = first_block<C>(params, work) * tile::kBlockKeys;  // the block's first
#pragma unroll 1
    for (int i = 0, part = 0; i < (work.blocks.end - work.blocks.begin) * C::kTilesPerBlock; ++i) {
      const int row = work.k_row + key;
      const int present = work.band.key_length - key;  // from there on
      const bool whole = present >= tile::kBlockKeys;
      const std::uint32_t at = 8u * static_cast<std::uint32_t>(ring.stage);
      const bool engine_k = whole && params.copy_engine_k != 0;
      const bool engine_v = whole && params.copy_engine_v != 0;
      const auto visible = [&](tile::Slot slot) {
        const int key = params.keys.key(part, slot.group, slot.element);
        return key < present ? key : -1;
      };
      load_tile<C>(params, ptx::shared_address(shared.k[ring.stage]), k_full + at, k_empty + at, ring.parity, engine_k,
                   true, row, part * params.keys.part_step, kv_head, batch,
                   [&](int r) { return visible(tile::slot_of_k_row(r, C::kTileK)); });
      load_tile<C>(params, ptx::shared_address(shared.v[ring.stage]), v_full + at, v_empty + at, ring.parity, engine_v,
                   false, row, part * params.keys.part_step, kv_head, batch,
                   [&](int r) { return visible(tile::slot_of_v_row(r)); });
      if (params.mask_bytes != 0 && threadIdx.x >= 32) {
        load_mask_blocks<C>(params, shared, work, key, present, tiles++);
      }
      __syncwarp();  // the driving thread's warp stays together: its other lanes must not run ahead of it
      ring.advance();
      if (++part == C::kTilesPerBlock) {
        part = 0;
        key += step;
      }
    }
  }
  if (threadIdx.x >= 32) scale_q<C>(params, shared, walk & 3);
  if (threadIdx.x == 0) announce_end<C>(shared, walk & 3);
}

template <typename C>
__device__ __forceinline__ void produce(const FusedParams& params, Shared<C>& shared) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // uniform, and known to be
  if constexpr (C::kGeneral) {
    walk_items<C>(params, shared);
  } else if constexpr (C::kFull) {
    if (warp < 3) {
      stream<C>(params, shared, static_cast<Kind>(warp), static_cast<Kind>(warp));
    } else {
      send_results<C>(params, shared);
    }
  } else {
    // Who brings K and V brings one of them, or both.
    const auto first = static_cast<Kind>(warp);
    const Kind last = C::kTileWarps == 1 ? kValues : first;
    const bool ragged = params.partial_blocks != 0;
    if (C::kQInRegisters && !ragged) {
      if (warp < 3) stream<C>(params, shared, first, first);  // Q by the same code, because it must be fetched
    } else if (warp == C::kTileWarps) {
      bring_queries<C>(params, shared);
    } else if (warp > C::kTileWarps) {
      Assistant<C>{params, shared}.run();
    } else if (ragged) {
      bring_tiles<C>(params, shared, first, last);
    } else if constexpr (!C::kQInRegisters) {
      stream<C>(params, shared, first, last);
    }
  }
}

}  // namespace dspattn::cuda::sm90
