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

// Rows 0 ... rows - 1 of a tile, by `threads` threads of which this is `thread`. row_at(r) is where row r lies in
// global memory, or null: then it is zeros and nothing is read. Columns at and past `columns` are zeros.
template <typename C, typename RowAt>
__device__ __forceinline__ void copy_rows(std::uint32_t tile, int rows, int columns, int vector, int thread,
                                          int threads, const void* valid_address, RowAt row_at) {
  const int chunk = thread & 7;
#pragma unroll 4
  for (int row = thread >> 3; row < rows; row += threads >> 3) {
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

}  // namespace dspattn::cuda::decode
