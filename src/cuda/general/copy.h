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
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/near_tf32.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/single.h"
#include "cuda/ptx/sm80.h"
#include "cuda/tile/copy_steps.h"
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

// Threads of the CTA.
template <typename C>
__device__ __forceinline__ int threads() {
  return C::kMostWarps > C::kWarps ? static_cast<int>(blockDim.x) : C::kMostThreads;
}

// Who copies which rows of a tile: a thread every so many from its first on. K and V: all threads of the CTA share a
// tile's rows. Q: a warp has its own rows, which nobody else reads.
template <typename C>
struct SharedRows {
  static constexpr int kRows = C::kTileK;
  __device__ __forceinline__ static int first() { return own_thread() >> 3; }
  __device__ __forceinline__ static int step() { return threads<C>() / 8; }
};
template <typename C>
struct WarpRows {
  static constexpr int kRows = C::kWarpRows;
  __device__ __forceinline__ static int first() { return own_thread() >> 3 & 3; }
  __device__ __forceinline__ static constexpr int step() { return 4; }
};

// Calls visit(offset in the tile) for every chunk that this thread copies.
template <typename C, typename Place, typename Rows, typename Visit>
__device__ __forceinline__ void each_own_chunk(Visit visit) {
  const int chunk = own_thread() & 7;
#pragma unroll 1
  for (int row = Rows::first(); row < Rows::kRows; row += Rows::step()) {
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel)
      visit(static_cast<std::uint32_t>(Place::offset(row, panel, chunk)));
  }
}

// A tile's rows, of which row r lies where row_at(r) says, or is zeros.
template <typename C, typename Place, typename Rows, typename At>
__device__ __forceinline__ void copy_rows_at(std::uint32_t to, const Source& source, At row_at) {
  constexpr int kColumns = 16 / C::kElementBytes;
  const int chunk = own_thread() & 7;
#pragma unroll 1
  for (int row = Rows::first(); row < Rows::kRows; row += Rows::step()) {
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

// A tile of K or V, of which row r is row source_row(r) of the source; negative or past its end: zeros.
template <typename C, typename Place, typename SourceRow>
__device__ __forceinline__ void copy_any_rows(std::uint32_t to, const Source& source, SourceRow source_row) {
  copy_rows_at<C, Place, SharedRows<C>>(to, source, [&](int row) -> RowAt {
    const int from = source_row(row);
    const bool exists = from >= 0 && from < source.rows;
    if (!exists || source.pages.pages == nullptr) return {exists, from * source.row_bytes};
    const int page = source.pages.pages->page_of(source.pages.sequence, from);
    return {page >= 0, page * source.pages.bytes + source.pages.pages->size.remainder(from) * source.row_bytes};
  });
}

// A warp's rows of Q: those of the source from `first_row` on.
template <typename C, typename Place>
__device__ __forceinline__ void copy_warp_rows(std::uint32_t to, const Source& source, int first_row) {
  constexpr int kStep = WarpRows<C>::step();
  if (source.vector == 0 || source.rows < first_row + C::kWarpRows) {
    return copy_rows_at<C, Place, WarpRows<C>>(to, source, [&](int row) -> RowAt {
      return {first_row + row < source.rows, (first_row + row) * source.row_bytes};
    });
  }
  const int chunk = own_thread() & 7;
  const int first = WarpRows<C>::first();
  const std::uint8_t* from = source.data + (first_row + first) * source.row_bytes + 16 * chunk;
  const int bytes = source.columns * C::kElementBytes - 16 * chunk;
  // Rows eight apart are swizzled alike.
  const std::uint32_t even = to + static_cast<std::uint32_t>(Place::offset(first, 0, chunk));
  const std::uint32_t odd = to + static_cast<std::uint32_t>(Place::offset(first + kStep, 0, chunk));
#pragma unroll
  for (int row = 0; row < C::kWarpRows; row += kStep) {
    const std::uint32_t target = row % 8 == 0 ? even + static_cast<std::uint32_t>(row * 128)
                                              : odd + static_cast<std::uint32_t>((row - kStep) * 128);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      ptx::cp_async_16(target + static_cast<std::uint32_t>(Place::offset(0, panel, 0)), from + 128 * panel,
                       bytes > 128 * panel ? 16 : 0);
    }
    from += kStep * source.row_bytes;
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
    return copy_any_rows<C, Place>(to, source, [&](int row) {
      const int key = key_of(part, row);
      return key < 0 ? key : first_key + key;
    });
  }
  const int chunk = own_thread() & 7;
  const int first = own_thread() >> 3;
  const std::uint8_t* data = source.data + (first_key + key_of(part, first)) * source.row_bytes + 16 * chunk;
  // Rows a multiple of eight apart are swizzled alike: places are sums, too.
  constexpr int kLeastStep = 4 * C::kWarps;
  constexpr bool kPlacesAreSums = kLeastStep % 8 == 0;
  const std::uint32_t target = to + (kPlacesAreSums ? static_cast<std::uint32_t>(Place::offset(first, 0, chunk)) : 0u);
  constexpr int kPasses = C::kTileK / kLeastStep;
  // Where a thread has many, addresses take registers.
  [[maybe_unused]] constexpr int kAtOnce = kPasses * C::kPanels > 64 || C::kMostWarps > C::kWarps ? 1 : kPasses;
#pragma unroll kAtOnce
  for (int row = 0; row < C::kTileK; row += SharedRows<C>::step()) {
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
  __device__ __forceinline__ void copy(std::uint32_t target, int tile, int columns, const tile::CopySteps& steps) {
    constexpr int kStep = tile::CopySteps::kRowsApart;
    static_assert(kStep % 8 == 0, "rows of a pass are swizzled alike");
    static_assert(kStep * 8 == C::kMostThreads && C::kMostWarps == C::kWarps);
    const int bytes = columns * C::kElementBytes - 16 * (own_thread() & 7);
#pragma unroll
    for (int i = 0; i < C::kTileK / kStep; ++i) {
      const std::uint8_t* at = i == 0 ? from : from + steps.row[i];
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel) {
        ptx::cp_async_16(target + static_cast<std::uint32_t>(Place::offset(i * kStep, panel, 0)), at + 128 * panel,
                         bytes > 128 * panel ? 16 : 0);
      }
    }
    from += steps.next[tile & 1];
  }
};

// Four values in shared memory, copied by this thread, as a tf32 product takes them.
__device__ __forceinline__ void round_chunk(std::uint32_t at) {
  const float4 x = ptx::load_shared_16(at);
  ptx::store_shared_16(at, ptx::near_tf32(x.x), ptx::near_tf32(x.y), ptx::near_tf32(x.z), ptx::near_tf32(x.w));
}

// Eight 16-bit values times a power of two, given twice in their type.
template <typename C>
__device__ __forceinline__ void scale_chunk(std::uint32_t at, std::uint32_t scale) {
  const float4 x = ptx::load_shared_16(at);
  const auto scaled = [scale](float pair) { return blocks::multiply_pairs<C>(__float_as_uint(pair), scale); };
  ptx::store_shared_16(at, scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w));
}

}  // namespace dspattn::cuda::general
