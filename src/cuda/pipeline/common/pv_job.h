// How pv_sparse's work is split, the copies of its operands, and the stores of its results.
#pragma once

#include <cstdint>

#include "cuda/pipeline/common/copy.h"
#include "cuda/pipeline/common/params.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::pipeline {

struct PvJob {
  int matrix, row0, row_block, column0;
  int first_place, end_place;  // of the stored matrix, in whole blocks
  int key_length;

  // Not kept: they are needed rarely, and the registers are taken.
  __device__ __forceinline__ int batch(const PvSparseParams& p) const { return matrix / p.heads; }
  __device__ __forceinline__ int head(const PvSparseParams& p) const { return matrix % p.heads; }
};

__device__ __forceinline__ PvJob pv_job(const PvSparseParams& p, int number, int rows, int columns) {
  PvJob job;
  const int tiles = p.row_tiles * p.column_tiles;
  const int tile = number % tiles;
  job.matrix = number / tiles;
  job.row0 = tile / p.column_tiles * rows;
  job.column0 = tile % p.column_tiles * columns;
  job.row_block = job.row0 / p.walk.block;
  job.key_length = static_cast<int>(p.walk.key_length(job.batch(p)));
  const SlotRange slots = p.walk.slots(job.row_block, job.batch(p));
  job.first_place = slots.begin * p.walk.block;
  job.end_place = min(slots.end * p.walk.block, static_cast<int>(p.weights.places));
  return job;
}

// V rows in the order of the places, block by block: a tile of 128 places is two blocks of 64.
template <typename Element, int kChunks, int kTile, typename Offset>
__device__ __forceinline__ void load_values(const PvSparseParams& p, const PvJob& job, const Element* v, int place,
                                            char* shared, int row_bytes, Offset offset) {
  const int rows = min(kTile, p.walk.block);
  const int end = min(place + kTile, job.end_place);
  for (; place < end; place += rows, shared += rows * row_bytes) {
    const int place0 = place & (p.walk.block - 1);
    const int block_key = p.walk.key_block(job.row_block, place / p.walk.block) * p.walk.block;
    copy_rows<Element, kChunks>(
        shared, v, p.v, job.column0, rows, block_key + p.walk.block <= job.key_length ? p.v.advance : 0,
        [&](int row) {
          const int key = block_key + key_in_block(place0 + row, p.group_log2, p.interleaved);
          return key < job.key_length ? key : -1;
        },
        offset);
  }
}

// The matrix's row that row `row` of the CTA is. Rows past the matrix repeat its last 32: their results are not stored.
__device__ __forceinline__ int weight_row(const PvSparseParams& p, const PvJob& job, int row) {
  const int from = job.row0 + row, rows = static_cast<int>(p.weights.rows);
  return from < rows ? from : rows - kRowUnit + row % kRowUnit;
}

// The nonzeros of `rows` rows, kChunks chunks from `place` on; offset(row, chunk) says where a chunk lies in shared
// memory and repeats itself every eight rows. Places past the job's are left out: the multiplication stops before them.
template <typename Element, int kChunks, typename Offset>
__device__ __forceinline__ void load_nonzeros(const PvSparseParams& p, const PvJob& job, int place, int rows,
                                              char* shared, Offset offset) {
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
  const std::int64_t row_elements = p.weights.places / 2;
  const Element* source = static_cast<const Element*>(p.weights.nonzeros) + job.matrix * p.weights.rows * row_elements;
  const std::uint32_t target = ptx::shared_address(shared);
  const int pass = static_cast<int>(blockDim.x) / kChunks;  // rows copied at once
  if (pass % 8 == 0 && job.row0 + rows <= static_cast<int>(p.weights.rows) &&
      place + kChunks * kElements * 2 <= job.end_place) {
    const int thread = ptx::forget(static_cast<int>(threadIdx.x));  // addresses are not kept over the multiplication
    const int row = thread / kChunks, chunk = thread % kChunks;
    const Element* from = source + (job.row0 + row) * row_elements + place / 2 + chunk * kElements;
    std::uint32_t to = target + static_cast<std::uint32_t>(offset(row, chunk));
#pragma unroll 8
    for (int i = row; i < rows; i += pass) {
      ptx::cp_async_16(to, from);
      from += pass * row_elements;
      to += static_cast<std::uint32_t>(pass * kChunks * kChunkBytes);
    }
  } else {
    ChunkWalk<kChunks>::each(rows, [&](int row, int chunk) {
      const int element = place / 2 + chunk * kElements;
      const bool exists = 2 * element < job.end_place;
      ptx::cp_async_16(target + static_cast<std::uint32_t>(offset(row, chunk)),
                       source + (exists ? weight_row(p, job, row) * row_elements + element : 0),
                       exists ? kChunkBytes : 0);
    });
  }
}

// Their metadata: kColumns word columns of `rows` words each, 16 bytes at a time.
template <int kColumns, int kWordPlaces>
__device__ __forceinline__ void load_metadata(const PvSparseParams& p, const PvJob& job, int place, int rows,
                                              char* shared) {
  const std::uint32_t* words = p.weights.metadata + job.matrix * p.weights.metadata_words;
  const std::uint32_t target = ptx::shared_address(shared);
  const int column = static_cast<int>(threadIdx.x) % kColumns;
  const int word_place = place + column * kWordPlaces;
  const int valid = word_place < job.end_place ? kChunkBytes : 0;
  const std::int64_t from = static_cast<std::int64_t>(word_place / kWordPlaces) * p.weights.rows;
  for (int row = static_cast<int>(threadIdx.x) / kColumns * 4; row < rows;
       row += static_cast<int>(blockDim.x) / kColumns * 4) {
    ptx::cp_async_16(target + static_cast<std::uint32_t>((column * rows + row) * 4),
                     words + (valid > 0 ? from + weight_row(p, job, row) : 0), valid);
  }
}

template <typename Element>
__device__ __forceinline__ Element from_float(float value) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) return __float2bfloat16(value);
  if constexpr (std::is_same_v<Element, __half>) return __float2half(value);
  if constexpr (std::is_same_v<Element, float>) return value;
}

template <typename Element>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) return ptx::pack_bf16x2(low, high);
  if constexpr (std::is_same_v<Element, __half>) return ptx::pack_half2(low, high);
  return 0;
}

// One row of a warp's results, of which `out` is the first of `columns` columns. `exists`: whether there is such a row.
// Of type Out, an element at a time.
template <typename Out, int kColumnBlocks>
__device__ __forceinline__ void store_row_by_elements(Out* out, int columns, bool exists,
                                                      const float (&acc)[kColumnBlocks][4], int r) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < 2 * kColumnBlocks; ++i) {
    const int column = 8 * (i / 2) + 2 * t + i % 2;
    if (exists && column < columns) out[column] = from_float<Out>(acc[i / 2][2 * r + i % 2]);
  }
}

// In whole 32-byte sectors: fp32 quads hold them.
template <int kColumnBlocks>
__device__ __forceinline__ void store_row_fp32(float* out, int columns, bool exists,
                                               const float (&acc)[kColumnBlocks][4], int r) {
#pragma unroll
  for (int block = 0; block < kColumnBlocks; ++block) {
    const int column = 8 * block + 2 * (static_cast<int>(threadIdx.x) % 4);
    if (exists && column < columns) {
      *reinterpret_cast<float2*>(out + column) = make_float2(acc[block][2 * r], acc[block][2 * r + 1]);
    }
  }
}

// 16-bit lanes t and t ^ 1 trade words of two neighbouring blocks first.
template <typename Element, int kColumnBlocks>
__device__ __forceinline__ void store_row_16bit(Element* out, int columns, bool exists,
                                                const float (&acc)[kColumnBlocks][4], int r) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  const bool odd = t % 2 != 0;
#pragma unroll
  for (int block = 0; block < kColumnBlocks; block += 2) {
    const std::uint32_t even_word = pack_pair<Element>(acc[block][2 * r], acc[block][2 * r + 1]);
    const std::uint32_t odd_word = pack_pair<Element>(acc[block + 1][2 * r], acc[block + 1][2 * r + 1]);
    const std::uint32_t received = __shfl_xor_sync(~0u, odd ? even_word : odd_word, 1);
    const int column = 8 * (block + (odd ? 1 : 0)) + 2 * (t - (odd ? 1 : 0));
    if (exists && column < columns) {
      ptx::store_8(out + column, odd ? received : even_word, odd ? odd_word : received);
    }
  }
}

// Row `row` of the output, in its type: the inputs' or fp32.
template <typename Element, int kColumnBlocks>
__device__ __forceinline__ void store_row(const PvSparseParams& p, const PvJob& job, std::int64_t row,
                                          const float (&acc)[kColumnBlocks][4], int r) {
  const bool exists = row < p.walk.n_q;
  const int columns = p.v.extent - job.column0;  // that exist from column0 on
  const bool by_elements = !p.out_aligned || columns % 4 != 0;
  const std::int64_t offset =
      job.batch(p) * p.out_stride[0] + job.head(p) * p.out_stride[1] + row * p.out_stride[2] + job.column0;
  if constexpr (sizeof(Element) == 2) {
    if (!p.out_fp32) {
      Element* out = static_cast<Element*>(p.out) + offset;
      if (by_elements) return store_row_by_elements(out, columns, exists, acc, r);
      return store_row_16bit(out, columns, exists, acc, r);
    }
  }
  float* out = static_cast<float*>(p.out) + offset;
  if (by_elements) return store_row_by_elements(out, columns, exists, acc, r);
  store_row_fp32(out, columns, exists, acc, r);
}

}  // namespace dspattn::cuda::pipeline
