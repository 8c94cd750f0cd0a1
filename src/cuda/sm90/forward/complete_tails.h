// The producer's warps that complete the last key block of a sequence that ends within it.
//
// TMA loads rows past the sequence's end, too, and a weight of 0 does not hide a NaN there, so these rows of V are
// overwritten with zeros (the scores of such keys are masked anyway). Where the block reaches past the end of the
// tensors these warps copy it, with predicated loads, zero-filled. And where Q stays in shared memory they multiply it
// by 2^-e.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/forward/load_q.h"
#include "cuda/sm90/forward/shared.h"

namespace dspattn::cuda::sm90 {

template <typename C>
struct TailCompleter {
  static constexpr int kThreads = 32 * C::kTailWarps;
  static constexpr int kFirst = 128 - kThreads;

  const ForwardParams& params;
  Shared<C>& shared;

  static_assert(8 % C::kTailWarps == 0 && C::kTileK % 32 == 0);

  __device__ __forceinline__ static int lane() { return ptx::opaque(static_cast<int>(threadIdx.x)) & 31; }
  __device__ __forceinline__ static int warp() { return (ptx::opaque(static_cast<int>(threadIdx.x)) - kFirst) >> 5; }

  // Calls visit(first, from) for every 32 rows of a tile, in all lanes: row first + lane is row `from` of the block, or
  // zero where that is negative.
  template <typename SourceRow, typename Visit>
  __device__ __forceinline__ static void for_rows(int begin, int step, SourceRow source_row, Visit visit) {
#pragma unroll 1
    for (int first = begin; first < C::kTileK; first += step) visit(first, source_row(first + lane()));
  }
  __device__ __forceinline__ static std::uint32_t address(const std::uint8_t* tile, int panel, int row, int chunk) {
    return ptx::shared_address(tile) +
           static_cast<std::uint32_t>(panel * C::kPanelKBytes + tile::swizzled_offset(row, chunk));
  }

  // Fills a tile. Eight lanes share a row.
  template <typename SourceRow>
  __device__ __forceinline__ void copy_rows(const std::uint8_t* tile, const RowsView& source, std::int64_t offset,
                                            int columns, SourceRow source_row) {
    const auto* base = static_cast<const std::uint16_t*>(source.data) + offset;
    const int chunk = lane() & 7;
    for_rows(0, 32, source_row, [&](int first, int own) {
#pragma unroll
      for (int i = 0; i < 8 / C::kTailWarps; ++i) {
        const int row = (i * C::kTailWarps + warp()) * 4 + (lane() >> 3);
        const int from = __shfl_sync(~0u, own, row);
        const std::uint16_t* source_data = base + (from >= 0 ? from : 0) * source.row_stride;
#pragma unroll
        for (int panel = 0; panel < C::kPanels; ++panel) {
          const int column = panel * 64 + chunk * 8;
          const bool inside = from >= 0 && column < columns;
          ptx::copy_async_16(address(tile, panel, first + row, chunk), inside ? source_data + column : base,
                             inside ? 16 : 0);
        }
      }
    });
    ptx::copy_async_wait();
  }

  // Clears the rows for which source_row is negative. A lane a row: the swizzle keeps their banks apart.
  template <typename SourceRow>
  __device__ __forceinline__ void clear_rows(const std::uint8_t* tile, SourceRow source_row) {
    for_rows(32 * warp(), kThreads, source_row, [&](int first, int from) {
      if (from >= 0) return;
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel) {
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {
          ptx::store_shared_16(address(tile, panel, first + lane(), chunk), 0, 0, 0, 0);
        }
      }
    });
  }

  // All of these warps' writes, then one arrival for the consumers.
  __device__ __forceinline__ void publish(const std::uint64_t& full) {
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(barrier_number(NamedBarrier::producer), kThreads);
    if (threadIdx.x == kFirst) ptx::mbarrier_arrive(ptx::shared_address(&full));
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
    if (item.tail == Tail::by_tma) {
      clear_rows(shared.v[stage], v_row);
    } else {
      const auto offset_of = [&](const RowsView& tensor) {
        return tensor.offset(item.batch, params.work.heads_per_kv_head.quotient(item.head),
                             item.k_row + block * tile::kBlockKeys);
      };
      copy_rows(shared.k[stage], params.k, offset_of(params.k), params.d,
                [&](int row) { return visible(tile::slot_of_k_row(row, C::kTileK)); });
      publish(shared.k_full[stage]);
      copy_rows(shared.v[stage], params.v, offset_of(params.v), params.out.columns, v_row);
    }
    publish(shared.v_full[stage]);
  }

  // Goes through this CTA's items; the end is an item of its own.
  __device__ __forceinline__ void run() {
    const int stages = stages_of<C>(params);
    int stage = 0;          // of the item's first entry
    unsigned parities = 0;  // bit s: of the next tile to complete in stage s
#pragma unroll 1
    for (int number = 0;; number = (number + 1) & 3) {
      const int buffer = number % C::kQBuffers;
      ptx::mbarrier_wait(ptx::shared_address(&shared.q_full[buffer]), number / C::kQBuffers & 1);
      const Item<C::kConsumers>& item = shared.items[number % kItemSlots];
      if constexpr (!C::kQInRegisters)
        scale_buffer<C>(params.scales, shared, buffer, static_cast<int>(threadIdx.x) - 32);
      if (item.valid == 0) return;
      // Seen by every lane. The item's description stays as it is: another in its slot waits for this arrival, or that
      // of scale_buffer, for an item after it.
      if constexpr (C::kQInRegisters) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.q_empty[buffer]));
      }
      if (item.tail != Tail::none) {
#pragma unroll 1
        for (int part = 0; part < C::kTilesPerBlock; ++part) {
          const int before = descends<C>(params.work) ? C::kQEntries : item.entries - C::kTilesPerBlock;
          const int at = (stage + before + part) % stages;
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
