// The producer warpgroup of the fused tf32 kernel: walks the items and their key tiles and fills the stages.
//
// One thread drives TMA, which rounds to tf32 on the way. V arrives as it lies in memory; all 128 threads then write it
// transposed, four keys of one value side by side, as the tensor core wants a tf32 operand. Tensors that TMA cannot
// address all threads copy, V straight to the transposed tile.
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
  bool in_item = false;      // the tile before was one of this item's
  bool after_empty = false;  // the last item announced has no tile

  // A tile on its way, as its transposition needs it.
  struct TileShare {
    int keys;             // of the sequence, from this thread's first on
    const float* values;  // of this thread's first key and column; used when threads read V themselves
  };

  __device__ __forceinline__ Producer(const ForwardParams& p, Shared<C>& s) : params(p), shared(s) {}

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ bool by_tma_q() const { return !C::kGeneral || params.tma_q != 0; }
  __device__ __forceinline__ bool by_tma_k() const { return !C::kGeneral || params.tma_k != 0; }
  __device__ __forceinline__ bool by_tma_v() const { return !C::kGeneral || params.tma_v != 0; }

  // Fetches run as many tiles ahead of transposing as there are raw stages. No wait may wait for itself. Fetching a
  // tile waits for consumers that are done with an earlier one: they need no V but what is transposed already.
  // Announcing an item waits until the consumers have started the one before, hence finished the one before that: all
  // of its V must be transposed. What is fetched and not transposed is at most the last tile fetched (two raw stages,
  // one of them just emptied), so only after an item without any tile is there something to wait for, see next_tile().
  __device__ __forceinline__ void run() {
    Ring<C::kStages> k_ring, v_ring;
    Ring<C::kRawStages> fetch_ring, raw_ring;
    TileShare shares[2];  // of the tiles on their way
    int fetched = 0;
    Next next = Next::tile;
#pragma unroll 1
    while (true) {
      while (fetched < C::kRawStages && next != Next::end) {
        next = next_tile(fetched);
        if (next == Next::tile) {
          load_k(k_ring);
          load_raw(fetch_ring);
          (fetched == 0 ? shares[0] : shares[1]) = own_share();
          ++fetched;
          k_ring.advance();
          fetch_ring.advance();
        }
        __syncwarp();  // the thread that drives TMA rejoins its warp
        if (next == Next::later) break;
      }
      if (fetched == 0) return;
      if (by_tma_v()) raw_ring.await_full(shared.raw_full);
      v_ring.await_empty(shared.v_empty);
      transpose(shares[0], ptx::shared_address(shared.raw[raw_ring.stage]),
                ptx::shared_address(shared.v[v_ring.stage]));
      ptx::fence_async_proxy();  // the tensor cores read what these threads wrote
      __syncwarp();
      if ((thread() & 31) == 0) {
        ptx::mbarrier_arrive(v_ring.barrier(shared.v_full));
        if (by_tma_v()) ptx::mbarrier_arrive(raw_ring.barrier(shared.raw_empty));
      }
      v_ring.advance();
      raw_ring.advance();
      shares[0] = shares[1];
      --fetched;
    }
  }

  // What follows the tile before: another one, of this item or the next that has any; nothing; or, for now, nothing
  // before the fetched tiles are transposed.
  enum class Next : std::uint8_t { tile, end, later };

  // Moves to the next tile and announces items on the way.
  __device__ __forceinline__ Next next_tile(int fetched) {
    if (in_item) {
      if (++part == C::kTilesPerBlock) {
        part = 0;
        row += tile::kBlockKeys;
        present -= tile::kBlockKeys;
      }
      if (present > present_end) return Next::tile;
      in_item = false;
      after_empty = false;
    }
#pragma unroll 1
    while (round < params.work.order.rounds) {
      if (after_empty && fetched > 0) return Next::later;
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
      in_item = present > present_end;
      after_empty = !in_item;
      if (in_item) return Next::tile;
    }
    if (after_empty && fetched > 0) return Next::later;
    if (thread() == 0 || !by_tma_q()) {  // the end: consumers read valid == 0
      await_description<C>(shared, number);
      if (thread() == 0) shared.items[number % kItemSlots].valid = 0;
      ptx::mbarrier_arrive(ptx::shared_address(shared.q_full));
    }
    return Next::end;
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

  // A tile of K or V by TMA: the first keys of its pairs, then the second. Rows past the tensor's end are
  // zeros.
  __device__ __forceinline__ void load_boxes(const std::uint8_t* tile, const CUtensorMap& map, std::uint32_t full) {
    ptx::mbarrier_arrive_expect(full, C::kTileKBytes);
#pragma unroll 1
    for (int box = 0; box < 2 * C::kPanels; ++box) {
      ptx::tma_load_4d(ptx::shared_address(tile) + static_cast<std::uint32_t>(box * (C::kPanelKBytes / 2)), &map, full,
                       (box >> 1) * 32, row + part * params.keys.part_step + (box & 1) * params.keys.pair_step, kv_head,
                       batch);
    }
  }

  // K of the next tile. Rows past the sequence's end may be anything, even NaN: their scores are masked.
  __device__ __forceinline__ void load_k(const Ring<C::kStages>& at) {
    if (by_tma_k() && thread() != 0) return;
    const std::uint32_t full = at.barrier(shared.k_full);
    const std::uint8_t* tile = shared.k[at.stage];
    at.await_empty(shared.k_empty);
    if (by_tma_k()) return load_boxes(tile, params.k_map, full);
    copy_and_arrive(tile, full, params.k, params.k.offset(batch, kv_head, row), C::kTileK, [&](int r) {
      const tile::Slot slot = tile::pair_of_k_row(r, C::kTileK);
      const int key = params.keys.key(part, slot.group, slot.element);
      return key < present ? key : -1;
    });
  }

  __device__ __forceinline__ void load_raw(const Ring<C::kRawStages>& at) {
    if (thread() != 0 || !by_tma_v()) return;
    at.await_empty(shared.raw_empty);
    load_boxes(shared.raw[at.stage], params.v_map, at.barrier(shared.raw_full));
  }

  __device__ __forceinline__ static tile::TransposeShare share() { return tile::transpose_share(thread(), C::kTileK); }

  // This thread's share of the next tile.
  __device__ __forceinline__ TileShare own_share() const {
    const int key = params.keys.key(part, tile::pair_of_v_column(4 * share().chunk).group, 0);
    TileShare result{present - key, nullptr};
    if constexpr (C::kGeneral) {
      result.values =
          static_cast<const float*>(params.v.data) + params.v.offset(batch, kv_head, row + key) + share().row;
    }
    return result;
  }

  // This thread's share of V, four keys of four values a patch. Absent keys are zeros: their weight is 0, but 0 times
  // NaN is not.
  __device__ __forceinline__ void transpose(const TileShare& from, std::uint32_t raw, std::uint32_t to) {
    const tile::TransposeShare own = share();
#pragma unroll
    for (int patch = 0; patch < C::kPatches; ++patch) {
      const int further = 32 * tile::panel_step(C::kTileK) * patch;  // rows of V transposed, columns of V
      float4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int distance = tile::key_distance(params.keys, i);
        if (by_tma_v()) {
          // Of patches only the panel differs.
          const int at = tile::raw_offset(own.chunk, i, own.row, C::kTileK) + (further >> 5) * C::kPanelKBytes;
          x[i] = ptx::load_shared_16(raw + static_cast<std::uint32_t>(at));
          if (distance >= from.keys) x[i] = make_float4(0, 0, 0, 0);
        } else {
          x[i] = load_tf32x4(from.values + distance * params.v.row_stride + further,
                             distance < from.keys ? params.out.columns - own.row - further : 0);
        }
      }
      const int first = tile::transposed_offset(own.row, own.chunk, C::kHeadDim) + further * 128;
      const auto at = [&](int value) { return to + static_cast<std::uint32_t>(tile::rows_further(first, value)); };
      store_values(at(0), x[0].x, x[1].x, x[2].x, x[3].x);
      store_values(at(1), x[0].y, x[1].y, x[2].y, x[3].y);
      store_values(at(2), x[0].z, x[1].z, x[2].z, x[3].z);
      store_values(at(3), x[0].w, x[1].w, x[2].w, x[3].w);
    }
  }
};

}  // namespace dspattn::cuda::sm90::tf32
