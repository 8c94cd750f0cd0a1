// Rows copied to a swizzled tile by the producer's 128 threads: what TMA cannot load, tensors it cannot address and
// partial key blocks whose absent keys must be zeros.
#pragma once

#include <cstdint>

#include "cuda/blocks/views.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/single.h"
#include "cuda/tile/key_map.h"

namespace dspattn::cuda::blocks {

// Calls copy(byte offset in the tile, row of the source or a negative number, first column) for every 16 bytes of
// `rows` rows, dealt to the threads such that eight neighbours share a row; row r is source row source_row(r). Panels
// of 128 bytes.
template <int kElementBytes, typename SourceRow, typename Copy>
__device__ __forceinline__ void for_each_chunk(int rows, int panels, SourceRow source_row, Copy copy) {
  constexpr int kChunkElements = 16 / kElementBytes;
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  const int chunk = thread & 7;
#pragma unroll 1
  for (int row = thread >> 3; row < rows; row += 16) {
    const int from = source_row(row);
#pragma unroll 1
    for (int panel = 0; panel < panels; ++panel) {
      copy(static_cast<std::uint32_t>(panel * rows * 128 + tile::swizzled_offset(row, chunk)), from,
           (panel * 8 + chunk) * kChunkElements);
    }
  }
}

// Two neighbouring 16-bit elements; columns at and past the end are zero.
__device__ __forceinline__ std::uint32_t load_pair(const std::uint16_t* row, int column, int columns) {
  std::uint32_t pair = 0;
  if (column < columns) pair = row[column];
  if (column + 1 < columns) pair |= static_cast<std::uint32_t>(row[column + 1]) << 16;
  return pair;
}

// Of 16-bit elements, from element `offset` of the source on; absent rows are zeros. `vector`: rows are 16-byte aligned
// and `columns` is a multiple of 8; such copies are asynchronous.
template <typename SourceRow>
__device__ __forceinline__ void copy_rows(std::uint32_t tile, const RowsView& source, std::int64_t offset, int rows,
                                          int panels, int columns, int vector, SourceRow source_row) {
  const auto* base = static_cast<const std::uint16_t*>(source.data) + offset;
  for_each_chunk<2>(rows, panels, source_row, [&](std::uint32_t at, int from, int column) {
    const std::uint16_t* source_data = base + (from >= 0 ? from : 0) * source.row_stride;
    const std::uint32_t to = tile + at;
    if (vector != 0) {
      const bool inside = from >= 0 && column < columns;
      ptx::copy_async_16(to, inside ? source_data + column : base, inside ? 16 : 0);
    } else {
#pragma unroll 1
      for (int i = 0; i < 8; i += 2) {
        ptx::store_shared(to + 2 * static_cast<std::uint32_t>(i),
                          load_pair(source_data, column + i, from >= 0 ? columns : 0));
      }
    }
  });
}

// Four neighbouring values rounded to tf32, 0 where `columns` ends.
__device__ __forceinline__ float4 load_tf32x4(const float* from, int columns) {
  const auto value = [&](int i) { return columns > i ? __uint_as_float(ptx::round_tf32(from[i])) : 0.0f; };
  return make_float4(value(0), value(1), value(2), value(3));
}

__device__ __forceinline__ void store_values(std::uint32_t to, float a, float b, float c, float d) {
  ptx::store_shared_16(to, __float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
}

// The same of fp32 elements, rounded to tf32.
template <typename SourceRow>
__device__ __forceinline__ void copy_rows_tf32(std::uint32_t tile, const RowsView& source, std::int64_t offset,
                                               int rows, int panels, int columns, SourceRow source_row) {
  const auto* base = static_cast<const float*>(source.data) + offset;
  for_each_chunk<4>(rows, panels, source_row, [&](std::uint32_t at, int from, int column) {
    const float4 x =
        load_tf32x4(base + (from >= 0 ? from : 0) * source.row_stride + column, from >= 0 ? columns - column : 0);
    store_values(tile + at, x.x, x.y, x.z, x.w);
  });
}

}  // namespace dspattn::cuda::blocks
