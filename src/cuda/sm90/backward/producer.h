// The producer warpgroup of the fused backward: it takes items, copies their K and V, streams the query tiles, and sees
// to it that shares of dQ are added in their order.
#pragma once

#include <cstdint>

#include "cuda/blocks/thread_copy.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/ordered_sums.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90/backward/describe.h"
#include "cuda/sm90/backward/shared.h"

namespace dspattn::cuda::sm90::backward {

// What the producer's warps do while the consumers work on an item.
enum class Role : std::uint8_t {
  load_queries,       // tiles of Q and dO, with their rows' numbers
  order_shares,       // of the first consumer warpgroup
  order_more_shares,  // of the second
  idle,
};

// Takes the next item and describes it; by one thread.
template <typename C>
__device__ __forceinline__ void take_item(const BackwardParams& params, Item& item) {
  const int number = atomicAdd(params.scratch.taken, 1);
  item.valid = number < params.items ? 1 : 0;
  if (item.valid == 0) return;
  const tile::GradientItem index = tile::gradient_item(number, params.key_tiles);
  item.sequence = index.sequence_head / params.kv_heads;
  item.kv_head = index.sequence_head - item.sequence * params.kv_heads;
  const SequenceRows rows = sequence_rows(params, item.sequence);
  item.batch = rows.batch;
  item.rows = rows.rows;
  item.keys = rows.keys;
  item.k_row = rows.k_row;
  item.first_tile = rows.first_tile;
  item.block = index.key_tile / C::kPartsPerBlock;
  item.part = index.key_tile - item.block * C::kPartsPerBlock;
  item.band = band_of(params, item.sequence, rows);
  item.tiles = tile::query_tiles_of(item.band, item.rows, item.block, C::kTileQ);
  item.walk = tile::first_of_walk(item.tiles, item.block, C::kTileQ, params.wraps != 0);
}

// Zeros for the NaN of a tile, by the threads that copied them: in products they would meet weights of 0. Rows that see
// such a key are NaN by their log-sum-exp or D.
template <typename C>
__device__ __forceinline__ void clear_nan(std::uint32_t tile) {
  for_each_chunk<2>(
      C::kKeys, C::kPanels, [](int row) { return row; },
      [&](std::uint32_t at, int, int) {
        const float4 given = ptx::load_shared_16(tile + at);
        const float values[4] = {given.x, given.y, given.z, given.w};
        std::uint32_t words[4], numbers = ~0u;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[i] = __float_as_uint(values[i]);
          const std::uint32_t number =
              C::kType == DType::bf16 ? ptx::equal_bf16x2(words[i], words[i]) : ptx::equal_f16x2(words[i], words[i]);
          words[i] &= number;
          numbers &= number;
        }
        if (numbers != ~0u) ptx::store_shared_16(tile + at, words[0], words[1], words[2], words[3]);
      });
}

// K's and V's rows, those of one warpgroup's scores behind the other's, each in the order of its columns. Keys that are
// not visible to anyone are zeros.
template <typename C>
__device__ __forceinline__ void copy_keys(const BackwardParams& params, Shared<C>& shared) {
  const Item& item = shared.item;
  constexpr int kParts = C::kKeys / C::kTileK;
  const int first = item.block * tile::kBlockKeys;
  const int present = item.band.key_length - first;
  const auto source_row = [&](int row) {
    const tile::Slot slot = tile::slot_of_k_row(row % C::kTileK, C::kTileK);
    const int key = params.keys.key(item.part * kParts + row / C::kTileK, slot.group, slot.element);
    return key < present ? key : -1;
  };
  const auto copy = [&](const std::uint8_t* tile, const RowsView& source, int columns, int vector) {
    copy_rows(ptx::shared_address(tile), source, source.offset(item.batch, item.kv_head, item.k_row + first), C::kKeys,
              C::kPanels, columns, vector, source_row);
  };
  copy(shared.k, params.k, params.d, params.vector_k);
  copy(shared.v, params.v, params.value_d, params.vector_v);
  ptx::copy_async_wait();
  clear_nan<C>(ptx::shared_address(shared.k));
  clear_nan<C>(ptx::shared_address(shared.v));
  ptx::fence_async_proxy();
}

// One thread asks for the item's query tiles, as stages become free.
template <typename C>
__device__ __forceinline__ void load_queries(const BackwardParams& params, Shared<C>& shared, Ring<C::kStages>& ring) {
  const int steps = steps_of(params, shared.item);
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    const std::int64_t tile = step_of(params, shared.item, i).scratch_tile;
    const std::uint32_t full = ring.barrier(shared.full);
    ring.await_empty(shared.empty);
    constexpr int kRowBytes = C::kTileQ * static_cast<int>(sizeof(RowNumbers));
    ptx::mbarrier_arrive_expect(full, 2 * C::kTileQBytes + kRowBytes);
    ptx::bulk_load(ptx::shared_address(shared.q[ring.stage]), params.scratch.q + tile * C::kTileQBytes, C::kTileQBytes,
                   full);
    ptx::bulk_load(ptx::shared_address(shared.rows[ring.stage]), params.scratch.rows + tile * C::kTileQ, kRowBytes,
                   full);
    ptx::bulk_load(ptx::shared_address(shared.d_out[ring.stage]), params.scratch.d_out + tile * C::kTileQBytes,
                   C::kTileQBytes, full);
    ring.advance();
  }
}

// For every step: lets a warpgroup add its share when all before it are in, and counts it when it is. A whole warp.
template <typename C>
__device__ __forceinline__ void order_shares(const BackwardParams& params, Shared<C>& shared, int warpgroup) {
  const int steps = steps_of(params, shared.item);
  const bool leads = threadIdx.x % 32 == 0;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    const Step step = step_of(params, shared.item, i);
    const tile::Turn turn = turn_of<C>(params, shared.item, step);
    const std::int64_t tile =
        static_cast<std::int64_t>(turn.sum) * params.query_tiles * params.work.heads.value + step.scratch_tile;
    std::int32_t* count = params.scratch.counts + tile * C::kConsumers + warpgroup;
    if (leads) {
      if (turn.before > 0) ptx::await_count(count, turn.before);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.may_add[warpgroup]));
    }
    __syncwarp();
    ptx::named_barrier_sync(barrier_number(NamedBarrier::shares_added, warpgroup), 128 + 32);
    if (leads) ptx::count_up(count);
    __syncwarp();
  }
}

// All of this CTA's items.
template <typename C>
__device__ __forceinline__ void produce(const BackwardParams& params, Shared<C>& shared) {
  const auto role = static_cast<Role>(uniform(static_cast<int>(threadIdx.x) / 32));
  Ring<C::kStages> ring;
#pragma unroll 1
  for (;;) {
    if (threadIdx.x == 0) take_item<C>(params, shared.item);
    ptx::named_barrier_sync(barrier_number(NamedBarrier::producer), 128);  // the item is described for the producer
    if (shared.item.valid != 0) copy_keys(params, shared);
    ptx::named_barrier_sync(barrier_number(NamedBarrier::item), C::kThreads);  // and for all, and K and V are there
    if (shared.item.valid == 0) return;
    switch (role) {
      case Role::load_queries:
        if (threadIdx.x == 0) load_queries(params, shared, ring);
        __syncwarp();
        break;
      case Role::order_shares:
        order_shares(params, shared, 0);
        break;
      case Role::order_more_shares:
        order_shares(params, shared, 1);
        break;
      case Role::idle:
        break;
    }
    ptx::named_barrier_sync(barrier_number(NamedBarrier::item), C::kThreads);  // nobody needs the item any more
  }
}

}  // namespace dspattn::cuda::sm90::backward
