// The producer warpgroup of the fused tf32 kernel: walks the items and their key tiles and fills the stages.
//
// One thread drives the copy engine for Q and K, which rounds to tf32 on the way; tensors it cannot address all 128
// threads copy. V all threads load from global memory into registers and store transposed: four keys of one value side
// by side, as the tensor core wants a tf32 operand.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/single.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused/producer.h"
#include "cuda/sm90/fused_tf32/config.h"

namespace dspattn::cuda::sm90::tf32 {

// Four neighbouring values, 0 where `columns` ends.
__device__ __forceinline__ float4 load_values(const float* from, int columns) {
  float4 x = make_float4(0, 0, 0, 0);
  if (columns > 0) x.x = from[0];
  if (columns > 1) x.y = from[1];
  if (columns > 2) x.z = from[2];
  if (columns > 3) x.w = from[3];
  return x;
}

template <typename C>
struct Producer {
  const FusedParams& params;
  Shared<C>& shared;

  Ring<C::kStages> ring;  // of the tile whose V is stored next
  // The tile to come: item, block and tile of the block.
  int turn = 0, number = 0;  // turn of the walk; items so far
  int kv_head = 0, batch = 0;
  int row = 0;                       // of K and V: the block's first key
  int present = 0, present_end = 0;  // keys of the sequence from the block on; the same after the item's last block
  int part = 0;
  const float* values = nullptr;  // of V: this thread's first key of that tile, its first column of unit 0

  float4 held[C::kUnitsAhead][4];  // of V: four values of each of four keys a unit

  __device__ __forceinline__ Producer(const FusedParams& p, Shared<C>& s) : params(p), shared(s) {}

  // Where registers are short, what follows from it is computed where it is used.
  __device__ __forceinline__ static int thread() {
    const int index = static_cast<int>(threadIdx.x);
    return C::kProducerRegisters < 80 ? ptx::opaque(index) : index;
  }

  __device__ __forceinline__ void run() {
    if (!advance(/*first=*/true)) return;
    load_k(ring);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < C::kUnitsAhead; ++i) load_unit(i, held[i]);
    bool more = true;
#pragma unroll 1
    while (more) {
      Ring<C::kStages> next = ring;
      next.advance();
      // K of the next tile goes out before the rest of V: its consumers need it first. No wait here can wait for the
      // other: whoever holds K's stage needs no V that is not stored yet.
      const auto step = [&] {
        more = advance(false);
        if (more) load_k(next);
        __syncwarp();  // the thread that drives the copy engine rejoins its warp
      };
      if constexpr (C::kUnits == C::kUnitsAhead) step();
      ptx::mbarrier_wait(ptx::shared_address(&shared.v_empty[ring.stage]), ring.parity ^ 1);
#pragma unroll
      for (int i = 0; i < C::kUnits; ++i) {
        // From here on what is loaded is the next tile's.
        if (C::kUnits > C::kUnitsAhead && i == C::kUnits - C::kUnitsAhead) step();
        store_unit(i, held[i % C::kUnitsAhead]);
        if (more) load_unit((i + C::kUnitsAhead) % C::kUnits, held[i % C::kUnitsAhead]);
      }
      ptx::fence_async_proxy();  // the tensor cores read what these threads wrote
      __syncwarp();
      if ((thread() & 31) == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.v_full[ring.stage]));
      ring = next;
    }
  }

  // Moves to the next tile, of this item or the next that has one; announces items on the way. False after the last.
  __device__ __forceinline__ bool advance(bool first) {
    if (!first) {
      int keys = params.keys.part_step;
      if (++part == C::kTilesPerBlock) {
        part = 0;
        row += tile::kBlockKeys;
        present -= tile::kBlockKeys;
        keys = tile::kBlockKeys - (C::kTilesPerBlock - 1) * params.keys.part_step;
      }
      values += keys * params.v.row_stride;
      if (present > present_end) return true;
    }
#pragma unroll 1
    while (turn < params.order.turns) {
      Work work;
      if (!describe_item<C>(params, turn++, work)) continue;
      load_q(work);
      ++number;
      kv_head = work.head / params.heads_per_kv_head;
      batch = work.batch;
      row = work.k_row + work.blocks.begin * tile::kBlockKeys;
      present = work.band.key_length - work.blocks.begin * tile::kBlockKeys;
      present_end = work.band.key_length - work.blocks.end * tile::kBlockKeys;
      part = 0;
      values = static_cast<const float*>(params.v.data) + batch * params.v.batch_stride +
               kv_head * params.v.head_stride + (row + first_key()) * params.v.row_stride + share().row;
      if (present > present_end) return true;
    }
    if (thread() == 0) {  // the end: consumers read valid == 0
      ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty), (number & 1) ^ 1);
      shared.items[number % kItemSlots].valid = 0;
      ptx::mbarrier_arrive(ptx::shared_address(&shared.q_full));
    }
    return false;
  }

  // Copies rows to a swizzled tile, rounded to tf32; row r comes from source_row(r), or is zero when that is negative.
  template <typename SourceRow>
  __device__ __forceinline__ void copy_rows(const std::uint8_t* tile, const Rows& source, std::int64_t offset, int rows,
                                            SourceRow source_row) {
    const auto* base = static_cast<const float*>(source.data) + offset;
    const int chunk = thread() & 7;
#pragma unroll 1
    for (int to = thread() >> 3; to < rows; to += 16) {
      const int from = source_row(to);
#pragma unroll 1
      for (int panel = 0; panel < C::kPanels; ++panel) {
        const int column = panel * 32 + chunk * 4;
        const float4 x =
            load_values(base + (from >= 0 ? from : 0) * source.row_stride + column, from >= 0 ? params.d - column : 0);
        const int at = panel * rows * 128 + tile::swizzled_offset(to, chunk);
        ptx::store_shared_16(ptx::shared_address(tile) + static_cast<std::uint32_t>(at), ptx::round_tf32(x.x),
                             ptx::round_tf32(x.y), ptx::round_tf32(x.z), ptx::round_tf32(x.w));
      }
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierProducer, 128);  // all of the tile is written
  }

  // Q of an item, and its description.
  __device__ __forceinline__ void load_q(const Work& work) {
    const std::uint32_t full = ptx::shared_address(&shared.q_full);
    const std::uint32_t empty = ptx::shared_address(&shared.q_empty);
    Item<C::kConsumers>& item = shared.items[number % kItemSlots];
    if (!C::kGeneral || params.copy_engine_q != 0) {
      if (thread() != 0) return;
      ptx::mbarrier_wait(empty, (number & 1) ^ 1);
      announce<C>(params, work, item);
      ptx::mbarrier_arrive_expect(full, C::kTileQBytes);
#pragma unroll 1
      for (int panel = 0; panel < C::kPanels; ++panel) {
        ptx::tma_load_4d(ptx::shared_address(shared.q) + static_cast<std::uint32_t>(panel * C::kPanelQBytes),
                         &params.q_map, full, panel * 32, work.q_row + work.row_begin, work.head, work.batch);
      }
      return;
    }
    ptx::mbarrier_wait(empty, (number & 1) ^ 1);
    const std::int64_t offset = work.batch * params.q.batch_stride + work.head * params.q.head_stride +
                                (work.q_row + work.row_begin) * params.q.row_stride;
    const int rows = work.rows - work.row_begin;
    copy_rows(shared.q, params.q, offset, C::kTileQ, [&](int r) { return r < rows ? r : -1; });
    if (thread() == 0) {
      announce<C>(params, work, item);
      ptx::mbarrier_arrive(full);
    }
  }

  // K of the tile to come: the first keys of its pairs, then the second. Rows past the sequence's end may be anything,
  // even NaN: their scores are masked. Rows past the tensor's end are zeros.
  __device__ __forceinline__ void load_k(const Ring<C::kStages>& at) {
    const std::uint32_t full = ptx::shared_address(&shared.k_full[at.stage]);
    const std::uint32_t empty = ptx::shared_address(&shared.k_empty[at.stage]);
    const std::uint8_t* tile = shared.k[at.stage];
    if (!C::kGeneral || params.copy_engine_k != 0) {
      if (thread() != 0) return;
      ptx::mbarrier_wait(empty, at.parity ^ 1);
      ptx::mbarrier_arrive_expect(full, C::kTileKBytes);
#pragma unroll 1
      for (int box = 0; box < 2 * C::kPanels; ++box) {
        const int element = box & 1;
        ptx::tma_load_4d(ptx::shared_address(tile) + static_cast<std::uint32_t>(box * (C::kPanelKBytes / 2)),
                         &params.k_map, full, (box >> 1) * 32,
                         row + part * params.keys.part_step + element * params.keys.pair_step, kv_head, batch);
      }
      return;
    }
    ptx::mbarrier_wait(empty, at.parity ^ 1);
    const std::int64_t offset =
        batch * params.k.batch_stride + kv_head * params.k.head_stride + row * params.k.row_stride;
    copy_rows(tile, params.k, offset, C::kTileK, [&](int r) {
      const tile::Slot slot = tile::pair_of_k_row(r, C::kTileK);
      const int key = params.keys.key(part, slot.group, slot.element);
      return key < present ? key : -1;
    });
    if (thread() == 0) ptx::mbarrier_arrive(full);
  }

  __device__ __forceinline__ static tile::TransposeShare share() { return tile::transpose_share(thread(), C::kTileK); }
  // The first key of this thread's share of tile 0 of a block.
  __device__ __forceinline__ int first_key() const {
    return params.keys.key(0, tile::pair_of_v_column(4 * share().chunk).group, 0);
  }

  // Unit i of the tile to come.
  __device__ __forceinline__ void load_unit(int i, float4 (&to)[4]) {
    const int keys = present - part * params.keys.part_step - first_key();  // of the sequence, from this thread's first
    const int column = 32 * tile::panel_step(C::kTileK) * i;
    const int columns = params.d_v - share().row - column;  // that exist from this thread's first on
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float* from = values + tile::key_distance(params.keys, x) * params.v.row_stride + column;
      const bool there = tile::key_distance(params.keys, x) < keys;
      // Absent keys are zeros: their weight is 0, but 0 times NaN is not.
      if (!C::kGeneral || params.vector_v != 0) {
        to[x] = ptx::load_global_16_if(from, there && columns > 0);
      } else {
        to[x] = load_values(from, there ? columns : 0);
      }
    }
  }

  __device__ __forceinline__ void store_unit(int i, const float4 (&from)[4]) {
    const tile::TransposeShare own = share();
    const int row0 = own.row + 32 * tile::panel_step(C::kTileK) * i;
    const std::uint32_t tile = ptx::shared_address(shared.v[ring.stage]);
    const auto store = [&](int value, float a, float b, float c, float d) {
      const int at = tile::transposed_offset(row0, own.chunk, C::kHeadDim);
      ptx::store_shared_16(tile + static_cast<std::uint32_t>(tile::rows_further(at, value)), ptx::nearest_tf32(a),
                           ptx::nearest_tf32(b), ptx::nearest_tf32(c), ptx::nearest_tf32(d));
    };
    store(0, from[0].x, from[1].x, from[2].x, from[3].x);
    store(1, from[0].y, from[1].y, from[2].y, from[3].y);
    store(2, from[0].z, from[1].z, from[2].z, from[3].z);
    store(3, from[0].w, from[1].w, from[2].w, from[3].w);
  }
};

}  // namespace dspattn::cuda::sm90::tf32
