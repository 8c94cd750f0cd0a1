// Copies of Q, K and V to shared memory by all threads of a CTA, asynchronous where rows are 16-byte aligned.
//
// Eight threads share 128 bytes of a row; rows of Q and K lie in swizzled panels of 128 bytes, V of fp32 in plain rows
// (Config::kVRowBytes). What does not exist (rows past a sequence's end, columns past d) is zeros.
#pragma once

#include <cstdint>

#include "cuda/blocks/pages.h"
#include "cuda/blocks/scores16.h"
#include "cuda/blocks/thread_copy.h"
#include "cuda/blocks/views.h"
#include "cuda/general/config.h"
#include "cuda/general/params.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/single.h"
#include "cuda/ptx/sm80.h"
#include "cuda/tile/key_map.h"

namespace dspattn::cuda::general {

// Where the pages of rows are.
struct SourcePages {
  const blocks::Pages* pages = nullptr;  // null: rows are in one piece
  int sequence = 0;
  std::int64_t bytes = 0;  // from one page to the next
};

// Rows of a tensor: those of one sequence and head.
struct Source {
  const std::uint8_t* data;  // of the first row
  std::int64_t row_bytes;
  int rows;     // that exist
  int columns;  // d or d_v
  int vector;
  SourcePages pages = {};
};

// A row of a source: bytes from its first.
struct RowAt {
  bool exists;
  std::int64_t offset;
};

// Where 16-byte chunk `chunk` of panel `panel` of a row lies in a tile of kRows rows.
template <int kRows>
struct Swizzled {
  DSPATTN_HOST_DEVICE static constexpr int offset(int row, int panel, int chunk) {
    return panel * kRows * 128 + tile::swizzled_offset(row, chunk);
  }
};
template <int kRowBytes>
struct PlainRows {
  DSPATTN_HOST_DEVICE static constexpr int offset(int row, int panel, int chunk) {
    return row * kRowBytes + panel * 128 + chunk * 16;
  }
};

// 16 bytes of a row from column `column` on, by elements. `row` null: zeros.
template <typename C>
__device__ __forceinline__ void copy_elements(std::uint32_t to, const std::uint8_t* row, int column, int columns) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (C::kElementBytes == 4) {
      words[i] = row != nullptr && column + i < columns ? reinterpret_cast<const std::uint32_t*>(row)[column + i] : 0u;
    } else {
      words[i] =
          blocks::load_pair(reinterpret_cast<const std::uint16_t*>(row), column + 2 * i, row != nullptr ? columns : 0);
    }
  }
  ptx::store_shared_16(to, words[0], words[1], words[2], words[3]);
}

// What depends on it is computed where it is needed, not kept over the main loop: registers are short.
__device__ __forceinline__ int own_thread() { return ptx::opaque(static_cast<int>(threadIdx.x)); }

template <typename C>
inline constexpr int kRowsOfAPass = C::kThreads / 8;

// Calls visit(offset in the tile) for every chunk that this thread copies.
template <typename C, typename Place, int kRows, typename Visit>
__device__ __forceinline__ void each_own_chunk(Visit visit) {
  const int chunk = own_thread() & 7;
  const int first = own_thread() >> 3;
#pragma unroll 1
  for (int row = first; row < kRows; row += kRowsOfAPass<C>) {
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel)
      visit(static_cast<std::uint32_t>(Place::offset(row, panel, chunk)));
  }
}

// kRows rows, of which row r lies where row_at(r) says, or is zeros.
template <typename C, typename Place, int kRows, typename At>
__device__ __forceinline__ void copy_rows_at(std::uint32_t to, const Source& source, At row_at) {
  constexpr int kColumns = 16 / C::kElementBytes;
  const int chunk = own_thread() & 7;
#pragma unroll 1
  for (int row = own_thread() >> 3; row < kRows; row += kRowsOfAPass<C>) {
    const auto [exists, offset] = row_at(row);
    const std::uint8_t* data = source.data + (exists ? offset : 0);
#pragma unroll 1
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const std::uint32_t target = to + static_cast<std::uint32_t>(Place::offset(row, panel, chunk));
      const int column = (panel * 8 + chunk) * kColumns;
      if (source.vector != 0) {
        const bool inside = exists && column < source.columns;
        ptx::cp_async_16(target, inside ? data + column * C::kElementBytes : source.data, inside ? 16 : 0);
      } else {
        copy_elements<C>(target, exists ? data : nullptr, column, source.columns);
      }
    }
  }
}

// kRows rows, of which row r is row source_row(r) of the source; negative or past its end: zeros.
template <typename C, typename Place, int kRows, typename SourceRow>
__device__ __forceinline__ void copy_any_rows(std::uint32_t to, const Source& source, SourceRow source_row) {
  copy_rows_at<C, Place, kRows>(to, source, [&](int row) -> RowAt {
    const int from = source_row(row);
    const bool exists = from >= 0 && from < source.rows;
    if (!exists || source.pages.pages == nullptr) return {exists, from * source.row_bytes};
    const int page = source.pages.pages->page_of(source.pages.sequence, from);
    return {page >= 0, page * source.pages.bytes + source.pages.pages->size.remainder(from) * source.row_bytes};
  });
}

// The first kRows rows of a source, in their order.
template <typename C, typename Place, int kRows>
__device__ __forceinline__ void copy_rows(std::uint32_t to, const Source& source) {
  if (source.vector == 0 || source.rows < kRows || kRowsOfAPass<C> % 8 != 0) {
    return copy_any_rows<C, Place, kRows>(to, source, [](int row) { return row; });
  }
  const int chunk = own_thread() & 7;
  const int first = own_thread() >> 3;
  const std::uint8_t* from = source.data + first * source.row_bytes + 16 * chunk;
  const std::uint32_t target = to + static_cast<std::uint32_t>(Place::offset(first, 0, chunk));
  const int bytes = source.columns * C::kElementBytes - 16 * chunk;
#pragma unroll
  for (int row = 0; row < kRows; row += kRowsOfAPass<C>) {
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      ptx::cp_async_16(target + static_cast<std::uint32_t>(Place::offset(row, panel, 0)), from + 128 * panel,
                       bytes > 128 * panel ? 16 : 0);
    }
    from += kRowsOfAPass<C> * source.row_bytes;
  }
}

// A tile of K or V, part `part` of the span of keys that begins with first_key. key_of(part, row): the tile row's key
// within the span. Where all of it exists, the keys of a thread's rows are sums of those of the row's bits: a multiply
// and an addition a row.
template <typename C, typename Place, typename KeyOf>
__device__ __forceinline__ void copy_tile(std::uint32_t to, const Source& source, const tile::KeyTiles& tiles,
                                          int first_key, int part, KeyOf key_of) {
  if (source.vector == 0 || source.pages.pages != nullptr || !tiles.is_filled() ||
      first_key + tiles.span > source.rows) {
    return copy_any_rows<C, Place, C::kTileK>(to, source, [&](int row) {
      const int key = key_of(part, row);
      return key < 0 ? key : first_key + key;
    });
  }
  const int chunk = own_thread() & 7;
  const int first = own_thread() >> 3;
  const std::uint8_t* data = source.data + (first_key + key_of(part, first)) * source.row_bytes + 16 * chunk;
  // Rows a multiple of eight apart are swizzled alike: places are sums, too.
  constexpr bool kPlacesAreSums = kRowsOfAPass<C> % 8 == 0;
  const std::uint32_t target = to + (kPlacesAreSums ? static_cast<std::uint32_t>(Place::offset(first, 0, chunk)) : 0u);
  constexpr int kPasses = C::kTileK / kRowsOfAPass<C>;
  // Where a thread has many, addresses take registers.
  [[maybe_unused]] constexpr int kAtOnce = kPasses * C::kPanels > 64 ? 1 : kPasses;
#pragma unroll kAtOnce
  for (int row = 0; row < C::kTileK; row += kRowsOfAPass<C>) {
    const std::uint8_t* from = data + key_of(0, row) * source.row_bytes;
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const int bytes = source.columns * C::kElementBytes - 16 * (8 * panel + chunk);
      const int place = kPlacesAreSums ? Place::offset(row, panel, 0) : Place::offset(first + row, panel, chunk);
      ptx::cp_async_16(target + static_cast<std::uint32_t>(place), from + 128 * panel, bytes > 0 ? 16 : 0);
    }
  }
}

// Where a thread finds its chunk of the tile that it copies next, where tiles exist wholly, rows are aligned and not
// far apart: tile after tile, so that a copy costs few instructions.
struct NextTile {
  const std::uint8_t* from;  // of the thread's first row

  // key_of(part, row): as in copy_tile().
  template <typename C, typename KeyOf>
  __device__ __forceinline__ static NextTile of(const Source& source, const tile::KeyTiles& tiles, int tile,
                                                KeyOf key_of) {
    const int key = tiles.first_key(tile) + key_of(tiles.part(tile), own_thread() >> 3);
    return {source.data + key * source.row_bytes + 16 * (own_thread() & 7)};
  }
  // Copies tile `tile`, the thread's first chunk to `target`, and goes on to the next.
  template <typename C, typename Place>
  __device__ __forceinline__ void copy(std::uint32_t target, int tile, int columns, const CopySteps& steps) {
    static_assert(kRowsOfAPass<C> % 8 == 0, "rows of a pass are swizzled alike");
    constexpr int kChunks = C::kTileK / kRowsOfAPass<C>;
    static_assert(kChunks <= CopySteps::kMostChunks);
    const int bytes = columns * C::kElementBytes - 16 * (own_thread() & 7);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const std::uint8_t* at = i == 0 ? from : from + steps.chunk[i];
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel) {
        ptx::cp_async_16(target + static_cast<std::uint32_t>(Place::offset(i * kRowsOfAPass<C>, panel, 0)),
                         at + 128 * panel, bytes > 128 * panel ? 16 : 0);
      }
    }
    from += steps.next[tile & 1];
  }
};

// Four values in shared memory, copied by this thread, to the nearest tf32.
__device__ __forceinline__ void round_chunk(std::uint32_t at) {
  const float4 x = ptx::load_shared_16(at);
  ptx::store_shared_16(at, ptx::nearest_tf32(x.x), ptx::nearest_tf32(x.y), ptx::nearest_tf32(x.z),
                       ptx::nearest_tf32(x.w));
}

// Eight 16-bit values times a power of two, given twice in their type.
template <typename C>
__device__ __forceinline__ void scale_chunk(std::uint32_t at, std::uint32_t scale) {
  const float4 x = ptx::load_shared_16(at);
  const auto scaled = [scale](float pair) { return blocks::multiply_pairs<C>(__float_as_uint(pair), scale); };
  ptx::store_shared_16(at, scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w));
}

}  // namespace dspattn::cuda::general
