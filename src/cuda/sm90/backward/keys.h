// An item of the fused backward, and its K and V: taken, described and copied to shared memory by the 128 threads of
// the query warpgroup.
#pragma once

#include <cstdint>

#include "cuda/blocks/scores16.h"
#include "cuda/blocks/thread_copy.h"
#include "cuda/ptx/barrier.h"
#include "cuda/sm90/backward/describe.h"
#include "cuda/sm90/backward/shared.h"
#include "cuda/tile/finite.h"
#include "cuda/tile/key_rows.h"

namespace dspattn::cuda::sm90::backward {

// Takes the next item and describes it; by one thread.
template <typename C>
__device__ __forceinline__ void take_item(const BackwardParams& params, Item& item) {
  const int number = atomicAdd(params.scratch.taken, 1);
  item.valid = number < params.items ? 1 : 0;
  if (item.valid == 0) return;
  const tile::GradientItem index = params.order.item(number);
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
  item.inside = tile::inside_tiles_of(item.band, item.rows, item.block, C::kTileQ);
  item.walk = tile::first_of_walk(item.tiles, item.block, C::kTileQ, params.wraps != 0);
}

// What is not finite in a tile, replaced by the threads that copied it: in products it would meet weights of 0. Rows
// that see such a key are NaN by their log-sum-exp or D; but a score of -inf has no weight, so an infinity of K becomes
// the largest number.
template <typename C, tile::Infinity kInfinity>
__device__ __forceinline__ void make_finite(std::uint32_t tile) {
  for_each_chunk<2>(
      C::kKeys, C::kPanels, [](int row) { return row; },
      [&](std::uint32_t at, int, int) {
        const float4 given = ptx::load_shared_16(tile + at);
        std::uint32_t words[4] = {__float_as_uint(given.x), __float_as_uint(given.y), __float_as_uint(given.z),
                                  __float_as_uint(given.w)};
        std::uint32_t zeros = 0;  // or NaN
#pragma unroll
        for (const std::uint32_t word : words) zeros |= multiply_pairs<C>(word, 0);
        if ((zeros & 0x7FFF7FFFu) == 0) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = tile::finite_pair<kInfinity>(words[i], C::kType);
        ptx::store_shared_16(tile + at, words[0], words[1], words[2], words[3]);
      });
}

// Rows of K or V, one part of 64 keys behind the other, each in the order of tile/key_rows.h. Keys that are not visible
// to anyone are zeros.
template <typename C>
__device__ __forceinline__ void copy_keys(const BackwardParams& params, const Item& item, const std::uint8_t* tile,
                                          const RowsView& source, int columns, int vector) {
  const int first = item.block * tile::kBlockKeys;
  const int present = item.band.key_length - first;
  const auto source_row = [&](int row) {
    const tile::Slot slot = tile::slot_of_key_row(row % kPartKeys);
    const int key = params.keys.key(item.part * C::kParts + row / kPartKeys, slot.group, slot.element);
    return key < present ? key : -1;
  };
  copy_rows(ptx::shared_address(tile), source, source.offset(item.batch, item.kv_head, item.k_row + first), C::kKeys,
            C::kPanels, columns, vector, source_row);
}

// When all copies are done that these threads have asked for.
template <typename C, tile::Infinity kInfinity>
__device__ __forceinline__ void complete_keys(const std::uint8_t* tile) {
  ptx::copy_async_wait();
  make_finite<C, kInfinity>(ptx::shared_address(tile));
  ptx::fence_async_proxy();
}

}  // namespace dspattn::cuda::sm90::backward
