// How a team of warps brings rows of Q, K and V to shared memory: 16 bytes a copy, asynchronously, in panels of 128
// bytes of columns in the 128-byte swizzle (tile/key_map.h).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/decode/config.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/sm80.h"
#include "cuda/tile/key_map.h"

namespace dspattn::cuda::decode {

template <typename C>
using Bits = std::conditional_t<C::kElementBytes == 4, std::uint32_t, std::uint16_t>;

// The 16 bytes from `column` on, of a row that is not aligned; zeros from `columns` on.
template <typename C>
__device__ __forceinline__ void copy_elements(std::uint32_t to, const Bits<C>* row, int column, int columns) {
#pragma unroll 1
  for (int word = 0; word < 4; ++word) {
    std::uint32_t value = 0;
#pragma unroll
    for (int i = 0; i < 4 / C::kElementBytes; ++i) {
      const int at = column + word * (4 / C::kElementBytes) + i;
      if (at < columns) value |= static_cast<std::uint32_t>(row[at]) << (16 * i);
    }
    ptx::store_shared(to + 4 * static_cast<std::uint32_t>(word), value);
  }
}

// Rows 0 ... count - 1 of a tile of `rows` rows, by `threads` threads of which this is `thread`. row_at(r) is where row
// r lies in global memory, or null: then it is zeros and nothing is read. Columns at and past `columns` are zeros.
template <typename C, typename RowAt>
__device__ __forceinline__ void copy_rows(std::uint32_t tile, int rows, int count, int columns, int vector, int thread,
                                          int threads, const void* valid_address, RowAt row_at) {
  const int chunk = thread & 7;
#pragma unroll 1
  for (int row = thread >> 3; row < count; row += threads >> 3) {
    const Bits<C>* from = row_at(row);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const int column = (8 * panel + chunk) * (16 / C::kElementBytes);
      const auto to = tile + static_cast<std::uint32_t>(panel * rows * 128 + tile::swizzled_offset(row, chunk));
      if (vector != 0) {
        const bool inside = from != nullptr && column < columns;
        ptx::cp_async_16(to, inside ? static_cast<const void*>(from + column) : valid_address, inside ? 16 : 0);
      } else {
        copy_elements<C>(to, from, column, from != nullptr ? columns : 0);
      }
    }
  }
}

// The copies of one thread, of rows that are aligned and not far apart, with few instructions: copies are what there is
// most of. A thread has a chunk of every panel.
template <typename C>
struct PlainCopies {
  // Long rows leave few registers for the addresses of many.
  static constexpr int kUnrolled = C::kPanels > 2 ? 2 : C::kGroups;
  static constexpr int kUnrolledOfPages = C::kPanels > 2 ? 1 : 4;
  std::uint32_t row_bytes;  // from one row to the next
  int bytes[C::kPanels];    // 16, or 0 past the last column

  __device__ __forceinline__ PlainCopies(std::uint32_t stride_bytes, int columns, int thread)
      : row_bytes(stride_bytes) {
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      bytes[panel] = (8 * panel + (thread & 7)) * (16 / C::kElementBytes) < columns ? 16 : 0;
    }
  }
  template <int kRows>
  __device__ __forceinline__ void copy(std::uint32_t to, const std::uint8_t* from, bool hidden) const {
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      // Where nothing is read the address need not be one.
      ptx::cp_async_16(to + panel * kRows * 128, from + 128 * panel, hidden ? 0 : bytes[panel]);
    }
  }

  // All rows of a tile: a thread has the same element of all its groups. `from`: the thread's chunk of that element of
  // group 0.
  __device__ __forceinline__ void copy_tile(std::uint32_t tile, const std::uint8_t* from, int group_step, int thread,
                                            int warps) const {
    const int element = thread >> 3 & 3;
    const auto group_bytes = static_cast<std::uint32_t>(group_step) * row_bytes;
    // Rows of even and of odd groups lie differently in the swizzle, each kind alike.
    const std::uint32_t even = tile + static_cast<std::uint32_t>(tile::swizzled_offset(element, thread & 7));
    const std::uint32_t odd = tile + static_cast<std::uint32_t>(tile::swizzled_offset(4 + element, thread & 7));
    if (warps == 1) {
#pragma unroll kUnrolled
      for (int group = 0; group < C::kGroups; ++group) {
        copy<C::kTileK>((group % 2 == 0 ? even : odd) + static_cast<std::uint32_t>(group / 2 * 1024), from, false);
        from += group_bytes;
      }
      return;
    }
    const int first = thread >> 5;
    from += static_cast<std::uint64_t>(group_bytes) * static_cast<std::uint32_t>(first);
#pragma unroll 2
    for (int group = first; group < C::kGroups; group += warps) {
      copy<C::kTileK>((group % 2 == 0 ? even : odd) + static_cast<std::uint32_t>(group / 2 * 1024), from, false);
      from += static_cast<std::uint64_t>(group_bytes) * static_cast<std::uint32_t>(warps);
    }
  }

  // The same of a tile at the border of what is seen: keys outside of [begin, end) are zeros and are not read. `key`:
  // of the thread's element of group 0.
  __device__ __forceinline__ void copy_border_tile(std::uint32_t tile, const std::uint8_t* from, int group_step,
                                                   int thread, int warps, int key, int begin, int end) const {
    const int element = thread >> 3 & 3;
    const auto group_bytes = static_cast<std::uint32_t>(group_step) * row_bytes;
#pragma unroll kUnrolledOfPages
    for (int group = thread >> 5; group < C::kGroups; group += warps) {
      const int own = key + group * group_step;
      copy<C::kTileK>(tile + static_cast<std::uint32_t>(tile::swizzled_offset(4 * group + element, thread & 7)),
                      from + static_cast<std::uint64_t>(group_bytes) * static_cast<std::uint32_t>(group),
                      own < begin || own >= end);
    }
  }

  // The same of pages, whose keys of a block lie in pieces of 16: lane l has where piece l % 8 begins, in bytes from
  // `base`, or a negative number. `key`: of the thread's element of group 0, in the block.
  __device__ __forceinline__ void copy_tile_of_pages(std::uint32_t tile, const std::uint8_t* base, std::int64_t piece,
                                                     int key, int group_step, int thread, int warps) const {
    const int element = thread >> 3 & 3;
    base += 16 * (thread & 7);
#pragma unroll kUnrolledOfPages
    for (int group = thread >> 5; group < C::kGroups; group += warps) {
      const int of_group = key + group * group_step;
      const std::int64_t from = __shfl_sync(~0u, piece, of_group >> 4);
      copy<C::kTileK>(
          tile + static_cast<std::uint32_t>(tile::swizzled_offset(4 * group + element, thread & 7)),
          base + (from < 0 ? 0 : from) + static_cast<std::uint32_t>(of_group & 15) * std::uint64_t{row_bytes},
          from < 0);
    }
  }

  // The kept rows of a tile, by one warp: two of a group, which 16 lanes have; code_at(i): of group 2 i + lane / 16.
  // Offsets of a group's elements from its first, in keys, are bytes of `elements`. `from`: the thread's chunk of group
  // 0's first element.
  template <typename CodeAt>
  __device__ __forceinline__ void copy_kept(std::uint32_t tile, const std::uint8_t* from, int group_step,
                                            std::uint32_t elements, CodeAt code_at, int lane) const {
    const int which = lane >> 3 & 1;
    const std::uint32_t to = tile + static_cast<std::uint32_t>(tile::swizzled_offset(lane >> 3, lane & 7));
    const std::uint32_t beside = tile + static_cast<std::uint32_t>(tile::swizzled_offset(4 + (lane >> 3), lane & 7));
    const auto group_bytes = static_cast<std::uint32_t>(group_step) * row_bytes;
    from += static_cast<std::uint64_t>(group_bytes) * static_cast<std::uint32_t>(lane >> 4);
#pragma unroll kUnrolled
    for (int i = 0; i < C::kGroups / 2; ++i) {
      const std::uint32_t code = code_at(i);
      const std::uint32_t key = elements >> (8 * tile::kept_element(code, which)) & 0xFFu;
      copy<C::kTileK / 2>((i % 2 == 0 ? to : beside) + static_cast<std::uint32_t>(i / 2 * 1024),
                          from + static_cast<std::uint64_t>(key) * row_bytes, tile::kept_is_hidden(code, which));
      from += 2 * static_cast<std::uint64_t>(group_bytes);
    }
  }

  // The same where no key is hidden. code_at(i): which two elements are kept, from the lane's own on.
  template <typename CodeAt>
  __device__ __forceinline__ void copy_seen(std::uint32_t tile, const std::uint8_t* from, int group_step,
                                            std::uint32_t elements, CodeAt code_at, int lane) const {
    const std::uint32_t to = tile + static_cast<std::uint32_t>(tile::swizzled_offset(lane >> 3, lane & 7));
    const std::uint32_t beside = tile + static_cast<std::uint32_t>(tile::swizzled_offset(4 + (lane >> 3), lane & 7));
    auto first = static_cast<std::uint32_t>(group_step * (lane >> 4));
#pragma unroll kUnrolled
    for (int i = 0; i < C::kGroups / 2; ++i) {
      const std::uint32_t key = first + ptx::permute_bytes(elements, 0, 0x4440u | (code_at(i) & 3u));
      copy<C::kTileK / 2>((i % 2 == 0 ? to : beside) + static_cast<std::uint32_t>(i / 2 * 1024),
                          from + std::uint64_t{key} * row_bytes, false);
      first += static_cast<std::uint32_t>(2 * group_step);
    }
  }

  // The same of pages where keys lie in runs: lane l has in `run` where that of element l % 4 begins.
  template <typename CodeAt>
  __device__ __forceinline__ void copy_kept_of_runs(std::uint32_t tile, const std::uint8_t* run, int group_step,
                                                    CodeAt code_at, int lane) const {
    const int which = lane >> 3 & 1;
    const std::uint32_t to = tile + static_cast<std::uint32_t>(tile::swizzled_offset(lane >> 3, lane & 7));
    const std::uint32_t beside = tile + static_cast<std::uint32_t>(tile::swizzled_offset(4 + (lane >> 3), lane & 7));
    const auto group_bytes = static_cast<std::uint32_t>(group_step) * row_bytes;
    const auto begin = static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(run));
    std::uint64_t at = std::uint64_t{group_bytes} * static_cast<std::uint32_t>(lane >> 4) + 16u * (lane & 7);
#pragma unroll kUnrolled
    for (int i = 0; i < C::kGroups / 2; ++i) {
      const std::uint32_t code = code_at(i);
      const std::uint64_t of_element = __shfl_sync(~0u, begin, tile::kept_element(code, which));
      copy<C::kTileK / 2>((i % 2 == 0 ? to : beside) + static_cast<std::uint32_t>(i / 2 * 1024),
                          reinterpret_cast<const std::uint8_t*>(static_cast<std::uintptr_t>(of_element + at)),
                          tile::kept_is_hidden(code, which));
      at += 2 * std::uint64_t{group_bytes};
    }
  }

  // The same where they lie in pieces of 16; `key`: of group 0's first element, in the block.
  __device__ __forceinline__ void copy_kept_of_pages(std::uint32_t tile, const std::uint8_t* base, std::int64_t piece,
                                                     int key, int group_step, std::uint32_t elements,
                                                     const std::uint8_t* kept, int lane) const {
    const int which = lane >> 3 & 1;
    base += 16 * (lane & 7);
#pragma unroll kUnrolledOfPages
    for (int i = 0; i < C::kGroups / 2; ++i) {
      const int group = 2 * i + (lane >> 4);
      const std::uint32_t code = kept[group];
      const int of_kept =
          key + group * group_step + static_cast<int>(elements >> (8 * tile::kept_element(code, which)) & 0xFFu);
      const std::int64_t from = __shfl_sync(~0u, piece, of_kept >> 4);
      copy<C::kTileK / 2>(
          tile + static_cast<std::uint32_t>(tile::swizzled_offset(2 * group + which, lane & 7)),
          base + (from < 0 ? 0 : from) + static_cast<std::uint32_t>(of_kept & 15) * std::uint64_t{row_bytes},
          from < 0 || tile::kept_is_hidden(code, which));
    }
  }
};

}  // namespace dspattn::cuda::decode
