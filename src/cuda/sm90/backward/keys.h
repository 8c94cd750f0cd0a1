// An item of the fused backward, and its K and V: taken, described and copied to shared memory by the 128 threads of
// the query warpgroup.
#pragma once

#include <cstdint>

#include "cuda/blocks/scores16.h"
#include "cuda/blocks/thread_copy.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/ordered_sums.h"
#include "cuda/sm90/backward/describe.h"
#include "cuda/sm90/backward/shared.h"
#include "cuda/tile/finite.h"
#include "cuda/tile/key_rows.h"

namespace dspattn::cuda::sm90::backward {

// Until prepare_rows, which runs beside this kernel, has written the item's query tiles; by one thread.
__device__ __forceinline__ void await_tiles(const BackwardParams& params, int sequence_head, int tile_q,
                                            std::int32_t ctas_done, Item& item, std::int32_t& all_prepared) {
  item.fresh = all_prepared == 0 ? 1 : 0;
  if (all_prepared != 0) return;
  if (ctas_done == params.prepare_ctas) {
    ptx::await_count(params.scratch.prepared, params.prepare_ctas);
    all_prepared = 1;
  } else {
    const int tiles = (item.rows + tile_q - 1) / tile_q * params.work.heads_per_kv_head.value;
    ptx::await_count(params.scratch.ready + sequence_head, tiles);
  }
}

// Takes the next item and describes it; by one thread.
template <typename C>
__device__ __forceinline__ void take_item(const BackwardParams& params, int number, std::int32_t ctas_done, Item& item,
                                          std::int32_t& all_prepared) {
  item.valid = number < params.items ? 1 : 0;
  if (item.valid == 0) return;
  const tile::GradientItem index = params.order.item(number);
  item.sequence = params.kv_heads.quotient(index.sequence_head);
  item.kv_head = index.sequence_head - item.sequence * params.kv_heads.value;
  const SequenceRows rows = sequence_rows(params, item.sequence, C::kTileQ);
  item.batch = rows.batch;
  item.rows = rows.rows;
  item.keys = rows.keys;
  item.k_row = rows.k_row;
  item.first_tile = rows.first_tile;
  const int key_tile = params.first_key_tile + index.key_tile;
  item.block = key_tile / C::kPartsPerBlock;
  item.part = key_tile - item.block * C::kPartsPerBlock;
  item.band = band_of(params, item.sequence, rows);
  item.tiles = tile::query_tiles_of(item.band, item.rows, item.block, C::kTileQ);
  item.inside = tile::inside_tiles_of(item.band, item.rows, item.block, C::kTileQ);
  item.ascends = index.ascends ? 1 : 0;
  item.walk =
      index.ascends ? item.tiles.end - 1 : tile::first_of_walk(item.tiles, item.block, C::kTileQ, params.wraps != 0);
  await_tiles(params, index.sequence_head, C::kTileQ, ctas_done, item, all_prepared);
}

// A thread's chunks of 16 bytes of a tile of K or V: of every 16th row the same, in each panel.
template <typename C>
struct KeyChunks {
  static constexpr int kRows = kPartKeys / 16;  // of a part

  int row = ptx::opaque(static_cast<int>(threadIdx.x)) >> 3;
  int column = (ptx::opaque(static_cast<int>(threadIdx.x)) & 7) * 8;

  // In the tile.
  __device__ __forceinline__ std::uint32_t offset(int part, int i, int panel) const {
    return static_cast<std::uint32_t>(tile::swizzled_offset(row, column / 8) + (part * kRows + i) * 16 * 128 +
                                      panel * C::kPanelKBytes);
  }
};

// Rows of K or V, one part of 64 keys behind the other, each in the order of tile/key_rows.h. Keys that are not visible
// to anyone are zeros. `vector`: rows are 16-byte aligned; the copies are then asynchronous.
template <typename C>
__device__ __forceinline__ void copy_keys(const BackwardParams& params, const Item& item, const std::uint8_t* tile,
                                          const RowsView& source, int columns, int vector) {
  const int first = item.block * tile::kBlockKeys;
  const int present = item.band.key_length - first;
  const std::int64_t offset = source.offset(item.batch, item.kv_head, item.k_row + first);
  const std::uint32_t to = ptx::shared_address(tile);
  if (vector == 0) {
    const auto source_row = [&](int row) {
      const tile::Slot slot = tile::slot_of_key_row(row % kPartKeys);
      const int key = params.keys.key(item.part * C::kParts + row / kPartKeys, slot.group, slot.element);
      return key < present ? key : -1;
    };
    return copy_rows(to, source, offset, C::kKeys, C::kPanels, columns, 0, source_row);
  }
  const KeyChunks<C> chunks;
  const auto* base = static_cast<const std::uint16_t*>(source.data) + offset + chunks.column;
#pragma unroll 1
  for (int part = 0; part < C::kParts; ++part) {
    // Rows that are 16 apart are keys of a stride: an address costs an addition.
    constexpr int kGroupsApart = tile::slot_of_key_row(16).group;
    const tile::Slot slot = tile::slot_of_key_row(chunks.row);
    int key = params.keys.key(item.part * C::kParts + part, slot.group, slot.element);
    const std::uint16_t* from = base + key * source.row_stride;
#pragma unroll 2
    for (int i = 0; i < chunks.kRows; ++i) {
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel) {
        const bool inside = key < present && chunks.column + panel * 64 < columns;
        ptx::copy_async_16(to + chunks.offset(part, i, panel), from + panel * 64, inside ? 16 : 0);
      }
      key += kGroupsApart * params.keys.group_step;
      from += kGroupsApart * params.keys.group_step * source.row_stride;
    }
  }
}

// What is not finite in a thread's own chunks, replaced: in products it would meet weights of 0. Rows that see such a
// key are NaN by their log-sum-exp or D; but a score of -inf has no weight, so an infinity of K becomes the largest
// number. Loads come in batches: behind the products' own a single one takes hundreds of clocks.
template <typename C, tile::Infinity kInfinity>
__device__ __forceinline__ void make_finite(std::uint32_t tile) {
  const KeyChunks<C> chunks;
#pragma unroll 1
  for (int panel_part = 0; panel_part < C::kPanels * C::kParts; ++panel_part) {
    const std::uint32_t first = tile + chunks.offset(panel_part % C::kParts, 0, panel_part / C::kParts);
    constexpr std::uint32_t kApart = 16 * 128;
    std::uint32_t words[chunks.kRows][4];
    std::uint32_t zeros = 0;  // or NaN
#pragma unroll
    for (std::uint32_t i = 0; i < chunks.kRows; ++i) ptx::load_shared_bytes<16>(first + i * kApart, words[i]);
#pragma unroll
    for (const auto& chunk : words) {
#pragma unroll
      for (const std::uint32_t word : chunk) zeros |= multiply_pairs<C>(word, 0);
    }
    if ((zeros & 0x7FFF7FFFu) == 0) continue;
#pragma unroll
    for (std::uint32_t i = 0; i < chunks.kRows; ++i) {
      const auto finite = [&](int word) { return tile::finite_pair<kInfinity>(words[i][word], C::kType); };
      ptx::store_shared_16(first + i * kApart, finite(0), finite(1), finite(2), finite(3));
    }
  }
}

// When all copies are done that these threads have asked for.
template <typename C, tile::Infinity kInfinity>
__device__ __forceinline__ void complete_keys(const std::uint8_t* tile) {
  ptx::copy_async_wait();
  make_finite<C, kInfinity>(ptx::shared_address(tile));
  ptx::fence_async_proxy();
}

}  // namespace dspattn::cuda::sm90::backward
