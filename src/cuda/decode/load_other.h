// Copies of tiles that are not plain: at the borders of what is seen, of tensors that are not aligned, of pages. A
// function that is called, for in the loops over tiles its instructions would stand between those that are always run.
#pragma once

#include <cstdint>

#include "cuda/decode/load.h"
#include "cuda/decode/params.h"

namespace dspattn::cuda::decode {

// First key of the block that a tile is of, and which of the block's tiles it is.
template <typename C>
__device__ __forceinline__ int block_of(int index) {
  return index / C::kTilesPerBlock * tile::kBlockKeys;
}
template <typename C>
__device__ __forceinline__ int part_of(int index) {
  return index % C::kTilesPerBlock;
}

// Offsets of a group's elements from its first, in keys, a byte each.
__device__ __forceinline__ std::uint32_t elements_of(const tile::KeyMap& keys) {
  return static_cast<std::uint32_t>(keys.pair_step) << 8 | static_cast<std::uint32_t>(keys.half_step) << 16 |
         static_cast<std::uint32_t>(keys.half_step + keys.pair_step) << 24;
}

// Pages are multiples of 16 keys: where keys 16 (lane % 8) ... of a block lie, in bytes from page 0; negative: nowhere.
template <typename C>
__device__ __forceinline__ std::int64_t piece_of_page(const Params& p, const blocks::RowsView& view, int batch,
                                                      int block, int lane) {
  const int key = block + 16 * (lane & 7);
  const int page = key < p.n_k ? p.pages.page_of(batch, key) : -1;
  const std::int64_t row = page * view.batch_stride + p.pages.size.remainder(key) * view.row_stride;
  return page < 0 ? -1 : row * C::kElementBytes;
}

// A row of K or V, or null where no row sees the key: it is not in [begin, end), or in no page.
template <typename C>
__device__ __forceinline__ const Bits<C>* row_of(const Params& p, const Bits<C>* base, const blocks::RowsView& view,
                                                 int batch, int begin, int end, int key) {
  if (key < begin || key >= end) return nullptr;
  if (p.pages.table == nullptr) return base + key * view.row_stride;
  const int page = p.pages.page_of(batch, key);
  return page < 0 ? nullptr : base + page * view.batch_stride + p.pages.size.remainder(key) * view.row_stride;
}

// Where a key's row begins, of a key head whose key 0 or page 0 is at `base`. Null: in no page.
template <typename C>
__device__ __forceinline__ const std::uint8_t* address_of_key(const Params& p, const Bits<C>* base,
                                                              const blocks::RowsView& view, int batch, int key) {
  std::int64_t row = key * view.row_stride;
  if (p.pages.table != nullptr) {
    const int page = key < p.n_k ? p.pages.page_of(batch, key) : -1;
    if (page < 0) return nullptr;
    row = page * view.batch_stride + p.pages.size.remainder(key) * view.row_stride;
  }
  return reinterpret_cast<const std::uint8_t*>(base + row);
}

// Tile `index` of K, or of V, by `threads` threads of which this is `thread`. kept: codes of the rows that are wanted,
// of V and by one warp; null: all are. Some row sees keys in [begin, end) alone.
template <typename C>
[[gnu::noinline]] __device__ void copy_other_tile(const Params& p, int of_v, int batch, int kv_head, int begin, int end,
                                                  int index, std::uint32_t to, const std::uint8_t* kept, int thread,
                                                  int threads) {
  const blocks::RowsView& view = of_v != 0 ? p.v : p.k;
  const std::uint32_t row_bytes = of_v != 0 ? p.v_row_bytes : p.k_row_bytes;
  const int columns = of_v != 0 ? p.results.out.columns : p.d;
  const int vector = of_v != 0 ? p.vector_v : p.vector_k;
  const bool paged = p.pages.table != nullptr;
  const auto* base = static_cast<const Bits<C>*>(view.data) + view.offset(paged ? 0 : batch, kv_head, 0);
  const int block = block_of<C>(index), part = part_of<C>(index);
  if (kept == nullptr && row_bytes != 0 && p.runs != 0) {
    const int key = block + p.keys.key(part, 0, thread >> 3 & 3);
    const std::uint8_t* run = address_of_key<C>(p, base, view, batch, key);
    PlainCopies<C>(row_bytes, run == nullptr ? 0 : columns, thread)
        .copy_border_tile(to, run + 16 * (thread & 7), p.keys.group_step, thread, p.teams.warps, key, begin, end);
    return;
  }
  const bool inside = kept != nullptr || (block >= begin && block + tile::kBlockKeys <= end);
  if (paged && row_bytes != 0 && inside) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(base);
    const std::int64_t piece = piece_of_page<C>(p, view, batch, block, thread & 31);
    const PlainCopies<C> copies(row_bytes, columns, thread);
    if (kept != nullptr) {
      copies.copy_kept_of_pages(to, bytes, piece, p.keys.key(part, 0, 0), p.keys.group_step, elements_of(p.keys), kept,
                                thread);
    } else {
      copies.copy_tile_of_pages(to, bytes, piece, p.keys.key(part, 0, thread >> 3 & 3), p.keys.group_step, thread,
                                p.teams.warps);
    }
    return;
  }
  const int rows = kept != nullptr ? C::kTileK / 2 : C::kTileK;
  copy_rows<C>(to, rows, rows, columns, vector, thread, threads, base, [&](int row) -> const Bits<C>* {
    int group = row >> 2, element = row & 3;
    if (kept != nullptr) {
      group = row >> 1;
      const std::uint32_t code = kept[group];
      if (tile::kept_is_hidden(code, row & 1)) return nullptr;
      element = tile::kept_element(code, row & 1);
    }
    return row_of<C>(p, base, view, batch, begin, end, block + p.keys.key(part, group, element));
  });
}

}  // namespace dspattn::cuda::decode
