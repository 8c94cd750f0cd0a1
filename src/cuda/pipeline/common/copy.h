// Tiles of rows from global to shared memory, 16 bytes at a time: asynchronously where the source is aligned, element
// by element where it is not. Rows and elements past the end arrive as zeros.
#pragma once

#include <cstdint>

#include "cuda/pipeline/common/params.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::pipeline {

// The first row of a (batch, head) of a strided tensor.
template <typename Element>
__device__ __forceinline__ const Element* matrix_of(const RowsParams& rows, std::int64_t batch, std::int64_t head) {
  return static_cast<const Element*>(rows.data) + batch * rows.batch_stride + head * rows.head_stride;
}

// Which chunks a thread copies: the same chunk of every kRowStep-th row (rows of more than 32 chunks: two chunks), so
// that what depends on the chunk is computed once.
template <int kChunks>
struct ChunkWalk {
  static constexpr unsigned kLanes = copy_lanes(kChunks);

  template <typename Visit>
  __device__ static __forceinline__ void each(int rows, Visit visit) {
    for (unsigned chunk = threadIdx.x % kLanes; chunk < kChunks; chunk += kLanes) {
#pragma unroll 1  // the copies are asynchronous: unrolling gains nothing and costs address registers
      for (unsigned row = threadIdx.x / kLanes; row < static_cast<unsigned>(rows); row += blockDim.x / kLanes) {
        visit(static_cast<int>(row), static_cast<int>(chunk));
      }
    }
  }
};

// One chunk of a row that cp.async cannot take; `valid` bytes of it exist.
template <typename Element>
__device__ __forceinline__ void copy_chunk_by_element(char* shared, const Element* global, int valid) {
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
  Element values[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    values[i] = i * static_cast<int>(sizeof(Element)) < valid ? global[i] : Element(0.0f);
  }
  *reinterpret_cast<uint4*>(shared) = *reinterpret_cast<const uint4*>(values);
}

// `rows` rows of kChunks chunks from element `column0` on. source_row(i) says which row of the source tile row i is,
// negative for a row of zeros; offset(row, chunk) where the chunk lies in shared memory. Elements from source.extent on
// are zeros. `advance` > 0 promises that nothing is to be filled and that the rows a thread copies (every
// rows_per_pass-th of the tile) lie `advance` rows apart in the source: then an address is an addition.
template <typename Element, int kChunks, typename SourceRow, typename Offset>
__device__ __forceinline__ void copy_rows(char* shared, const Element* global, const RowsParams& source, int column0,
                                          int rows, int advance, SourceRow source_row, Offset offset) {
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
  if (advance > 0) {
    const int lane_chunk = static_cast<int>(threadIdx.x % ChunkWalk<kChunks>::kLanes);
    const int first = static_cast<int>(threadIdx.x / ChunkWalk<kChunks>::kLanes);
    const int pass = static_cast<int>(blockDim.x / ChunkWalk<kChunks>::kLanes);
    const std::int64_t stride = advance * source.row_stride;
    const Element* from =
        global + static_cast<std::int64_t>(source_row(first)) * source.row_stride + column0 + lane_chunk * kElements;
    const std::uint32_t target = ptx::shared_address(shared);
#pragma unroll 4
    for (int row = first; row < rows; row += pass) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += static_cast<int>(ChunkWalk<kChunks>::kLanes)) {
        ptx::cp_async_16(target + static_cast<std::uint32_t>(offset(row, lane_chunk + chunk)),
                         from + chunk * kElements);
      }
      from += stride;
    }
    return;
  }
  const auto valid_bytes = [&](int chunk) {
    const int bytes = (source.extent - column0 - chunk * kElements) * static_cast<int>(sizeof(Element));
    return max(0, min(bytes, kChunkBytes));
  };
  if (source.aligned) {
    const std::uint32_t target = ptx::shared_address(shared);
    ChunkWalk<kChunks>::each(rows, [&](int row, int chunk) {
      const int from = source_row(row);
      const int valid = from < 0 ? 0 : valid_bytes(chunk);
      // Where nothing is read the address is still one of the tensor's.
      const std::int64_t element = valid > 0 ? from * source.row_stride + column0 + chunk * kElements : 0;
      ptx::cp_async_16(target + static_cast<std::uint32_t>(offset(row, chunk)), global + element, valid);
    });
  } else {
    ChunkWalk<kChunks>::each(rows, [&](int row, int chunk) {
      const int from = source_row(row);
      const Element* address = global + static_cast<std::int64_t>(max(from, 0)) * source.row_stride + column0;
      copy_chunk_by_element(shared + offset(row, chunk), address + chunk * kElements,
                            from < 0 ? 0 : valid_bytes(chunk));
    });
  }
}

// Equal tiles of rows, one after another, that are copied without a question asked: a thread's chunk of a tile is an
// addition away from that of the tile before, and its kPasses chunks of a tile are equal steps apart on either side.
template <int kPasses>
struct RowStream {
  const char* from = nullptr;  // this thread's first chunk of the next tile
  std::int64_t pass_bytes = 0, tile_bytes = 0;
  std::uint32_t to = 0, to_step = 0;  // offset in the tile's shared memory

  __device__ __forceinline__ void copy(std::uint32_t tile) {
    const char* source = from;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      ptx::cp_async_16(tile + to + static_cast<std::uint32_t>(i) * to_step, source);
      source += pass_bytes;
    }
    from += tile_bytes;
  }
};

// Rounds four fp32 in shared memory to tf32, in place.
__device__ __forceinline__ void round_chunk_tf32(char* shared) {
  float4 value = *reinterpret_cast<const float4*>(shared);
  *reinterpret_cast<uint4*>(shared) = make_uint4(ptx::nearest_tf32(value.x), ptx::nearest_tf32(value.y),
                                                 ptx::nearest_tf32(value.z), ptx::nearest_tf32(value.w));
}

// Rounds the chunks that this thread copied with copy_rows: its own copies are visible to it after cp_async_wait, so
// the barrier that publishes the tile publishes the rounded one. Rounding here costs a quarter (at four warps) of
// rounding every fragment.
template <int kChunks, typename Offset>
__device__ __forceinline__ void round_rows_tf32(char* shared, int rows, Offset offset) {
  ChunkWalk<kChunks>::each(rows, [&](int row, int chunk) { round_chunk_tf32(shared + offset(row, chunk)); });
}

}  // namespace dspattn::cuda::pipeline
