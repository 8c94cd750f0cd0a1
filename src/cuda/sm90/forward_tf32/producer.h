// The producer warpgroup of the fused tf32 kernel: walks the items and their key tiles and fills the stages.
//
// One thread drives TMA for Q and K, which rounds to tf32 on the way; what TMA cannot address all threads copy. V all
// 128 threads read into registers and write transposed, four keys of one value side by side, as the tensor core wants a
// tf32 operand: shared memory is what this kernel is short of, and so V passes through it once.
#pragma once

#include <cstdint>

#include "cuda/blocks/thread_copy.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/forward_tf32/shared.h"
#include "cuda/tile/pair_map.h"

namespace dspattn::cuda::sm90::tf32 {

template <typename C>
struct Producer {
  const ForwardParams& params;
  Shared<C>& shared;

  // The next tile: item, block and tile of the block.
  int round = 0, number = 0;  // of the walk; items so far
  int kv_head = 0, batch = 0;
  int row = 0;                       // of K and V: the block's first key
  int present = 0, present_end = 0;  // keys of the sequence from the block on; the same after the item's last block
  int part = 0;

  // What this thread moves of a tile of V.
  struct TileShare {
    const float* values;  // of its first key and column
    int keys;             // of the sequence, from its first on
    bool whole;           // all of the tile is there: nothing to check
  };
  // Four keys of four values a patch, on their way from memory.
  using Values = float4[C::kPatchesAtOnce][4];

  __device__ __forceinline__ Producer(const ForwardParams& p, Shared<C>& s) : params(p), shared(s) {}

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ bool by_tma_q() const { return !C::kGeneral || params.tma_q != 0; }
  __device__ __forceinline__ bool by_tma_k() const { return !C::kGeneral || params.tma_k != 0; }
  // Rows of V can be read in 16 bytes.
  __device__ __forceinline__ bool vector_v() const { return !C::kGeneral || params.vector_v != 0; }

  // V of a tile is on its way while the consumers free the place for it. No wait may wait for itself: all V that was
  // read is stored before the next tile is looked for, since announcing an item waits until the consumers have finished
  // the one before the last, and they need V for that.
  __device__ __forceinline__ void run() {
    Ring<C::kStages> ring;  // of K and of V
    Values values;
#pragma unroll 1
    while (next_tile()) {
      load_k(ring);
      __syncwarp();  // the thread that drives TMA rejoins its warp
      const TileShare own = own_share();
      load_values(own, 0, values);
      ring.await_empty(shared.v_empty);
      const std::uint32_t to = ptx::shared_address(shared.v[ring.stage]);
      store_transposed(values, 0, to);
#pragma unroll 1
      for (int patch = C::kPatchesAtOnce; patch < C::kPatches; patch += C::kPatchesAtOnce) {
        load_values(own, patch, values);
        store_transposed(values, patch, to);
      }
      ptx::fence_async_proxy();  // the tensor cores read what these threads wrote
      __syncwarp();
      if ((thread() & 31) == 0) ptx::mbarrier_arrive(ring.barrier(shared.v_full));
      ring.advance();
    }
  }

  // Moves to the next tile, of this item or the next that has any, and announces items on the way; false at the end.
  __device__ __forceinline__ bool next_tile() {
    if (present > present_end) {  // the tile before was one of this item's
      if (++part == C::kTilesPerBlock) {
        part = 0;
        row += tile::kBlockKeys;
        present -= tile::kBlockKeys;
      }
      if (present > present_end) return true;
    }
#pragma unroll 1
    while (round < params.work.order.rounds) {
      Work work;
      if (!describe_item<C>(params.work, round++, work)) continue;
      load_q(work);
      ++number;
      kv_head = params.work.heads_per_kv_head.quotient(work.head);
      batch = work.batch;
      row = work.k_row + work.blocks.begin * tile::kBlockKeys;
      present = work.band.key_length - work.blocks.begin * tile::kBlockKeys;
      present_end = work.band.key_length - work.blocks.end * tile::kBlockKeys;
      part = 0;
      if (present > present_end) return true;
    }
    if (thread() == 0 || !by_tma_q()) {  // the end: consumers read valid == 0
      await_description<C>(shared, number);
      if (thread() == 0) shared.items[number % kItemSlots].valid = 0;
      ptx::mbarrier_arrive(ptx::shared_address(shared.q_full));
    }
    return false;
  }

  // Copies rows to a tile and arrives at its "full" barrier, every thread for what it wrote.
  template <typename SourceRow>
  __device__ __forceinline__ void copy_and_arrive(const std::uint8_t* tile, std::uint32_t full, const RowsView& source,
                                                  std::int64_t offset, int rows, SourceRow source_row) {
    copy_rows_tf32(ptx::shared_address(tile), source, offset, rows, C::kPanels, params.d, source_row);
    ptx::fence_async_proxy();
    ptx::mbarrier_arrive(full);
  }

  // Q of an item, and its description.
  __device__ __forceinline__ void load_q(const Work& work) {
    if (by_tma_q() && thread() != 0) return;
    await_description<C>(shared, number);
    if (thread() == 0) {
      announce<C>(params.work, params.out, params.lse, work, shared.items[number % kItemSlots]);
    }
    const std::uint32_t full = ptx::shared_address(shared.q_full);
    const int row = work.q_row + work.row_begin;
    if (by_tma_q()) {
      ptx::mbarrier_arrive_expect(full, C::kTileQBytes);
#pragma unroll 1
      for (int panel = 0; panel < C::kPanels; ++panel) {
        ptx::tma_load_4d(ptx::shared_address(shared.q) + static_cast<std::uint32_t>(panel * C::kPanelQBytes),
                         &params.q_map, full, panel * 32, row, work.head, work.batch);
      }
      return;
    }
    const int rows = work.rows - work.row_begin;
    copy_and_arrive(shared.q[0], full, params.q, params.q.offset(work.batch, work.head, row), C::kTileQ,
                    [&](int r) { return r < rows ? r : -1; });
  }

  // A tile of K by TMA: the first keys of its pairs, then the second. Rows past the tensor's end are zeros.
  __device__ __forceinline__ void load_boxes(const std::uint8_t* tile, std::uint32_t full) {
    ptx::mbarrier_arrive_expect(full, C::kTileKBytes);
#pragma unroll 1
    for (int box = 0; box < 2 * C::kPanels; ++box) {
      ptx::tma_load_4d(ptx::shared_address(tile) + static_cast<std::uint32_t>(box * (C::kPanelKBytes / 2)),
                       &params.k_map, full, (box >> 1) * 32,
                       row + part * params.keys.part_step + (box & 1) * params.keys.pair_step, kv_head, batch);
    }
  }

  // K of the next tile. Rows past the sequence's end may be anything, even NaN: their scores are masked.
  __device__ __forceinline__ void load_k(const Ring<C::kStages>& at) {
    if (by_tma_k() && thread() != 0) return;
    const std::uint32_t full = at.barrier(shared.k_full);
    const std::uint8_t* tile = shared.k[at.stage];
    at.await_empty(shared.k_empty);
    if (by_tma_k()) return load_boxes(tile, full);
    copy_and_arrive(tile, full, params.k, params.k.offset(batch, kv_head, row), C::kTileK, [&](int r) {
      const tile::Slot slot = tile::pair_of_k_row(r, C::kTileK);
      const int key = params.keys.key(part, slot.group, slot.element);
      return key < present ? key : -1;
    });
  }

  // Computed anew each time: kept, it would take registers that V needs.
  __device__ __forceinline__ static tile::TransposeShare share() {
    return tile::transpose_share(ptx::opaque(thread()), C::kTileK);
  }

  // Three patches are moved as two and one.
  __device__ __forceinline__ static bool is_past(int patch) {
    return C::kPatches % C::kPatchesAtOnce != 0 && patch >= C::kPatches;
  }

  // This thread's share of the next tile.
  __device__ __forceinline__ TileShare own_share() const {
    const tile::TransposeShare own = share();
    const int key = params.keys.key(part, tile::pair_of_v_column(4 * own.chunk).group, 0);
    const auto* v = static_cast<const float*>(params.v.data) + params.v.offset(batch, kv_head, row + key);
    return {v + own.row, present - key, present >= tile::kBlockKeys && params.out.columns >= C::kHeadDim && vector_v()};
  }

  // Patches from `first` on of this thread's share. Absent keys are zeros: their weight is 0, but 0 times NaN is not.
  // Nothing is done with what comes, so that nothing waits for it yet. These threads share the issue slots with the
  // consumers: what is computed here for every value is time lost there.
  __device__ __forceinline__ void load_values(const TileShare& from, int first, Values& values) {
    const std::int64_t pair = ptx::opaque(params.keys.pair_step) * params.v.row_stride;
    const std::int64_t two_pairs = ptx::opaque(2 * params.keys.group_step) * params.v.row_stride;
    const auto load = [&](auto one) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* key = from.values + (i & 1) * pair + (i >> 1) * two_pairs;
#pragma unroll
        for (int patch = 0; patch < C::kPatchesAtOnce; ++patch) {
          if (is_past(first + patch)) continue;
          const int further = 32 * tile::panel_step(C::kTileK) * (first + patch);  // columns of V
          values[patch][i] = one(key + further, i, further);
        }
      }
    };
    if (from.whole) {
      load([](const float* at, int, int) { return *reinterpret_cast<const float4*>(at); });
    } else {
      const int columns = params.out.columns - share().row;
      load([&](const float* at, int i, int further) {
        const bool present = tile::key_distance(params.keys, i) < from.keys;
        return load_four(at, present ? columns - further : 0, vector_v());
      });
    }
  }

  // Writes them where the product looks for them, rounded to tf32; every variant comes this way, so ties need not go
  // where TMA's would.
  __device__ __forceinline__ void store_transposed(const Values& values, int first, std::uint32_t to) {
    const tile::TransposeShare own = share();
#pragma unroll
    for (int patch = 0; patch < C::kPatchesAtOnce; ++patch) {
      if (is_past(first + patch)) continue;
      const float4(&x)[4] = values[patch];
      const int start = tile::transposed_offset(own.row, own.chunk, C::kHeadDim) +
                        32 * tile::panel_step(C::kTileK) * (first + patch) * 128;
      const auto at = [&](int value) { return to + static_cast<std::uint32_t>(tile::rows_further(start, value)); };
      const auto store = [&](int value, float a, float b, float c, float d) {
        ptx::store_shared_16(at(value), ptx::nearest_tf32(a), ptx::nearest_tf32(b), ptx::nearest_tf32(c),
                             ptx::nearest_tf32(d));
      };
      store(0, x[0].x, x[1].x, x[2].x, x[3].x);
      store(1, x[0].y, x[1].y, x[2].y, x[3].y);
      store(2, x[0].z, x[1].z, x[2].z, x[3].z);
      store(3, x[0].w, x[1].w, x[2].w, x[3].w);
    }
  }
};

}  // namespace dspattn::cuda::sm90::tf32
