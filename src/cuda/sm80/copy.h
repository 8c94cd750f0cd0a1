// Tiles of rows from global to shared memory, 16 bytes at a time: asynchronously where the source is aligned, element
// by element where it is not. Rows and elements past the end arrive as zeros.
#pragma once

#include <cstdint>

#include "cuda/ptx/sm80.h"
#include "cuda/sm80/params.h"

namespace dspattn::cuda::sm80 {

// The first row of a (batch, head) of a strided tensor.
template <typename Element>
__device__ __forceinline__ const Element* matrix_of(const RowsParams& rows, std::int64_t batch, std::int64_t head) {
  return static_cast<const Element*>(rows.data) + batch * rows.batch_stride + head * rows.head_stride;
}

// One chunk of a row; `valid` bytes of it exist.
template <typename Element>
__device__ __forceinline__ void copy_chunk(char* shared, const Element* global, int valid, bool aligned) {
  if (aligned) {
    ptx::cp_async_16(ptx::shared_address(shared), global, valid);
    return;
  }
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
  Element values[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    values[i] = i * static_cast<int>(sizeof(Element)) < valid ? global[i] : Element(0.0f);
  }
  *reinterpret_cast<uint4*>(shared) = *reinterpret_cast<const uint4*>(values);
}

// `rows` rows of kRowBytes each, swizzled; source_row(i) says which row of the source tile row i is, negative for a row
// of zeros. Elements from rows.extent on are zeros.
template <typename Element, int kRowBytes, typename SourceRow>
__device__ __forceinline__ void copy_rows(char* shared, const Element* global, const RowsParams& source, int rows,
                                          SourceRow source_row) {
  constexpr int kChunks = kRowBytes / kChunkBytes;
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
#pragma unroll 1  // the copies are asynchronous: unrolling gains nothing and costs address registers
  for (int i = static_cast<int>(threadIdx.x); i < rows * kChunks; i += static_cast<int>(blockDim.x)) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const std::int64_t from = source_row(row);
    int valid = (source.extent - chunk * kElements) * static_cast<int>(sizeof(Element));
    valid = from < 0 || valid < 0 ? 0 : (valid < kChunkBytes ? valid : kChunkBytes);
    const Element* address = valid > 0 ? global + from * source.row_stride + chunk * kElements : global;
    copy_chunk(shared + swizzled_wide(row, chunk, kRowBytes), address, valid, source.aligned);
  }
}

// Rounds four fp32 in shared memory to tf32, in place.
__device__ __forceinline__ void round_chunk_tf32(char* shared) {
  uint4 value = *reinterpret_cast<const uint4*>(shared);
  value.x = ptx::round_tf32(value.x);
  value.y = ptx::round_tf32(value.y);
  value.z = ptx::round_tf32(value.z);
  value.w = ptx::round_tf32(value.w);
  *reinterpret_cast<uint4*>(shared) = value;
}

// Rounds the chunks that this thread copied with copy_rows: its own copies are visible to it after cp_async_wait, so
// the barrier that publishes the tile publishes the rounded one. Rounding here costs a quarter (at four warps) of
// rounding every fragment.
template <int kRowBytes>
__device__ __forceinline__ void round_rows_tf32(char* shared, int rows) {
  constexpr int kChunks = kRowBytes / kChunkBytes;
  for (int i = static_cast<int>(threadIdx.x); i < rows * kChunks; i += static_cast<int>(blockDim.x)) {
    round_chunk_tf32(shared + swizzled_wide(i / kChunks, i % kChunks, kRowBytes));
  }
}

}  // namespace dspattn::cuda::sm80
