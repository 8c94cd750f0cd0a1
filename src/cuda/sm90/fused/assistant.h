// Three warps that assist the thread that drives the copy engine, where sequences may end within a block of 128 keys.
//
// They complete the last block of such a sequence: the engine brings rows past the sequence's end, and a weight of 0
// does not hide a NaN there, so these rows of V are overwritten with zeros (the scores of such keys are masked anyway).
// Where the block reaches past the end of the tensors they copy it, with predicated loads, zero-filled. And where Q
// stays in shared memory they multiply it by 2^-e.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused/softmax.h"
#include "cuda/sm90/fused/work.h"

namespace dspattn::cuda::sm90 {

template <typename C>
struct Assistant {
  static constexpr int kThreads = 32 * kAssistants;

  const FusedParams& params;
  Shared<C>& shared;

  __device__ __forceinline__ static int thread() {
    return ptx::opaque(static_cast<int>(threadIdx.x)) - kFirstAssistant;
  }

  // Calls visit(row, chunk, offset in the tile) for the thread's 16-byte chunks of every panel.
  template <typename Visit>
  __device__ __forceinline__ static void for_chunks(Visit visit) {
    const int chunk = thread() & 7;
#pragma unroll 1
    for (int row = thread() >> 3; row < C::kTileK; row += kThreads / 8) visit(row, chunk);
  }
  __device__ __forceinline__ static std::uint32_t place(const std::uint8_t* tile, int panel, int row, int chunk) {
    return ptx::shared_address(tile) +
           static_cast<std::uint32_t>(panel * C::kPanelKBytes + tile::swizzled_offset(row, chunk));
  }

  // Fills a tile; row r comes from row source_row(r) of the block, or is zero when that is negative.
  template <typename SourceRow>
  __device__ __forceinline__ void copy_rows(const std::uint8_t* tile, const Rows& source, std::int64_t offset,
                                            int columns, SourceRow source_row) {
    const auto* base = static_cast<const std::uint16_t*>(source.data) + offset;
    for_chunks([&](int row, int chunk) {
      const int from = source_row(row);
      const std::uint16_t* source_data = base + (from >= 0 ? from : 0) * source.row_stride;
#pragma unroll 1
      for (int panel = 0; panel < C::kPanels; ++panel) {
        const int column = panel * 64 + chunk * 8;
        const bool inside = from >= 0 && column < columns;
        ptx::copy_async_16(place(tile, panel, row, chunk), inside ? source_data + column : base, inside ? 16 : 0);
      }
    });
    ptx::copy_async_wait();
  }

  // Clears the rows for which source_row is negative.
  template <typename SourceRow>
  __device__ __forceinline__ void clear_rows(const std::uint8_t* tile, SourceRow source_row) {
    for_chunks([&](int row, int chunk) {
      if (source_row(row) >= 0) return;
#pragma unroll 1
      for (int panel = 0; panel < C::kPanels; ++panel) {
        ptx::store_shared_16(place(tile, panel, row, chunk), 0, 0, 0, 0);
      }
    });
  }

  // All of the assistants' writes, then one arrival for the consumers.
  __device__ __forceinline__ void publish(const std::uint64_t& full) {
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierProducer, kThreads);
    if (threadIdx.x == kFirstAssistant) ptx::mbarrier_arrive(ptx::shared_address(&full));
  }

  // Tile `part` of the item's last block.
  __device__ __forceinline__ void complete(const Item<C::kConsumers>& item, int part, int stage) {
    const int block = item.key_length / tile::kBlockKeys;
    const int present = item.key_length - block * tile::kBlockKeys;
    const auto visible = [&](tile::Slot slot) {
      const int key = params.keys.key(part, slot.group, slot.element);
      return key < present ? key : -1;
    };
    const auto v_row = [&](int row) { return visible(tile::slot_of_v_row(row)); };
    if (item.tail == Tail::by_engine) {
      clear_rows(shared.v[stage], v_row);
    } else {
      const auto offset_of = [&](const Rows& tensor) {
        return item.batch * tensor.batch_stride + params.heads_per_kv_head.quotient(item.head) * tensor.head_stride +
               (item.k_row + block * tile::kBlockKeys) * tensor.row_stride;
      };
      copy_rows(shared.k[stage], params.k, offset_of(params.k), params.d,
                [&](int row) { return visible(tile::slot_of_k_row(row, C::kTileK)); });
      publish(shared.k_full[stage]);
      copy_rows(shared.v[stage], params.v, offset_of(params.v), params.d_v, v_row);
    }
    publish(shared.v_full[stage]);
  }

  // Goes through this block's items; the end comes as an item of its own.
  __device__ __forceinline__ void run() {
    const int stages = stages_of<C>(params);
    int stage = 0;          // of the item's first entry
    unsigned parities = 0;  // bit s: of the next tile to complete in stage s
#pragma unroll 1
    for (int number = 0;; number = (number + 1) & 3) {
      const int buffer = number % C::kQBuffers;
      ptx::mbarrier_wait(ptx::shared_address(&shared.q_full[buffer]), number / C::kQBuffers & 1);
      const Item<C::kConsumers>& item = shared.items[number % kItemSlots];
      if constexpr (!C::kQInRegisters) scale_buffer<C>(params, shared, buffer, thread());
      if (item.valid == 0) return;
      // Seen by every lane. The item's description stays as it is: another in its place waits for this arrival, or that
      // of scale_buffer, for an item after it.
      if constexpr (C::kQInRegisters) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.q_empty[buffer]));
      }
      if (item.tail != Tail::none) {
#pragma unroll 1
        for (int part = 0; part < C::kTilesPerBlock; ++part) {
          const int at = (stage + item.entries - C::kTilesPerBlock + part) % stages;
          ptx::mbarrier_wait(ptx::shared_address(&shared.tail_begun[at]), static_cast<int>(parities >> at & 1));
          parities ^= 1u << at;
          complete(item, part, at);
        }
      }
      stage = (stage + item.entries) % stages;
    }
  }
};

}  // namespace dspattn::cuda::sm90
