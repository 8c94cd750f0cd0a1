// pv_sparse: out = A V with A sparse (nonzeros and metadata as qk_prune writes them), on sparse tensor cores.
//
// A CTA takes 64 (d_v <= 64) or 32 (above) rows per warp by kHeadDim columns of one (batch, head) and walks over tiles
// of 64 bytes of nonzeros a row (64 places of a 16-bit type, 32 of fp32). Nonzeros, metadata and V rows stream through
// a ring of cp.async stages. V's rows arrive in the order of the places (tile_maps.h), so that either grouping is the
// same product. A metadata word in memory is the register that mma.sp wants: lane l of a warp reads word l of a 32-row
// unit, and the sparsity selector picks its upper or lower 16 rows.
//
// Requires: rows padded to 32, places in whole metadata words, every metadata word of the padded matrix valid.
#pragma once

#include <cstdint>

#include "cuda/ptx/sm80.h"
#include "cuda/sm80/copy.h"
#include "cuda/sm80/params.h"

namespace dspattn::cuda::sm80 {

inline constexpr int kNonzeroRowBytes = 64;  // of a tile: two steps of 32 bytes

template <typename Element, int kHeadDim>
struct PvConfig {
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr bool kFp32 = kElementBytes == 4;
  static constexpr int kTile = tile_places(kElementBytes);
  static constexpr int kStepPlaces = kTile / 2;
  // 128 accumulator registers either way; more rows per warp read V from shared memory less often.
  static constexpr int kWarpRows = kHeadDim == 64 ? 64 : 32;
  static constexpr int kMaxThreads = 128;
  static constexpr int kRowBlocks = kWarpRows / 16;
  static constexpr int kColumnBlocks = kHeadDim / 8;
  static constexpr int kValueRowBytes = kFp32 ? padded_floats(kHeadDim) * 4 : kHeadDim * kElementBytes;
  static constexpr int kValueBytes = kTile * kValueRowBytes;
  static constexpr int kValueChunks = kHeadDim * kElementBytes / kChunkBytes;
  static constexpr int kStages = 3;

  static DSPATTN_HOST_DEVICE constexpr int metadata_bytes(int rows) { return rows * 8; }  // two words a row
  static DSPATTN_HOST_DEVICE constexpr int stage_bytes(int rows) {
    return rows * kNonzeroRowBytes + kValueBytes + metadata_bytes(rows);
  }
  static DSPATTN_HOST_DEVICE constexpr int shared_bytes(int rows) { return kStages * stage_bytes(rows); }
};

struct PvJob {
  int matrix, row0, row_block, first_tile, end_tile, column0;
  int key_length;

  // Not kept: they are needed rarely, and the registers are taken.
  __device__ __forceinline__ int batch(const PvSparseParams& p) const { return matrix / p.heads; }
  __device__ __forceinline__ int head(const PvSparseParams& p) const { return matrix % p.heads; }
};

template <int kTile>
__device__ __forceinline__ PvJob pv_job(const PvSparseParams& p, int rows, int columns) {
  PvJob job;
  const int tiles = p.row_tiles * p.column_tiles;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  job.matrix = static_cast<int>(blockIdx.x) / tiles;
  job.row0 = tile / p.column_tiles * rows;
  job.column0 = tile % p.column_tiles * columns;
  job.row_block = job.row0 / p.walk.block;
  job.key_length = static_cast<int>(p.walk.key_length(job.batch(p)));
  const SlotRange slots = p.walk.slots(job.row_block, job.batch(p));
  const int stored_tiles = static_cast<int>((p.weights.places + kTile - 1) / kTile);
  job.first_tile = slots.begin << p.walk.tiles_log2<kTile>();
  job.end_tile = min(slots.end << p.walk.tiles_log2<kTile>(), stored_tiles);
  return job;
}

// Where a chunk of a V row lies. fp32 rows are padded instead of swizzled: they are read word by word.
template <typename Element, int kHeadDim>
struct ValueOffset {
  using Config = PvConfig<Element, kHeadDim>;
  __device__ __forceinline__ int operator()(int row, int chunk) const {
    return Config::kFp32 ? row * Config::kValueRowBytes + chunk * kChunkBytes
                         : swizzled_wide(row, chunk, Config::kValueRowBytes);
  }
};

// V rows in the order of the places.
template <typename Element, int kHeadDim>
__device__ __forceinline__ void load_values(const PvSparseParams& p, const PvJob& job, const Element* v, int tile,
                                            char* shared) {
  using Config = PvConfig<Element, kHeadDim>;
  const int slot = p.walk.slot_of_tile<Config::kTile>(tile);
  const int place0 = p.walk.place_in_block<Config::kTile>(tile);
  const int block_key = p.walk.key_block(job.row_block, slot) * p.walk.block;
  copy_rows<Element, Config::kValueChunks>(
      shared, v, p.v, job.column0, Config::kTile, block_key + p.walk.block <= job.key_length ? p.v.advance : 0,
      [&](int row) {
        const int key = block_key + key_in_block(place0 + row, p.group_log2, p.interleaved);
        return key < job.key_length ? key : -1;
      },
      ValueOffset<Element, kHeadDim>());
}

// Nonzeros and metadata of `rows` rows. Rows past the matrix repeat its last 32 (their results are not stored); places
// past it are left out: the multiplication stops before them.
template <typename Element, int kHeadDim>
__device__ __forceinline__ void load_weights(const PvSparseParams& p, const PvJob& job, int tile, int rows,
                                             char* nonzeros, char* metadata) {
  using Config = PvConfig<Element, kHeadDim>;
  const std::int64_t row_elements = p.weights.places / 2;
  const int matrix_rows = static_cast<int>(p.weights.rows);
  const auto source_row = [&](int row) {
    const int from = job.row0 + row;
    return from < matrix_rows ? from : matrix_rows - kRowUnit + row % kRowUnit;
  };
  const Element* source = static_cast<const Element*>(p.weights.nonzeros) + job.matrix * p.weights.rows * row_elements;
  const std::int64_t element0 = static_cast<std::int64_t>(tile) * (Config::kTile / 2);
  const std::uint32_t nonzeros_address = ptx::shared_address(nonzeros);
  if (job.row0 + rows <= matrix_rows && (tile + 1) * Config::kTile <= static_cast<int>(p.weights.places)) {
    // A warp copies as many rows as it multiplies, eight at a time.
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));  // addresses are not kept over the multiplication
    const int row = thread / 4, chunk = thread % 4;
    const int pass = static_cast<int>(blockDim.x) / 4;
    const Element* from =
        source + (job.row0 + row) * row_elements + element0 + chunk * (kChunkBytes / Config::kElementBytes);
    const std::uint32_t target = nonzeros_address + static_cast<std::uint32_t>(swizzled_64(row, chunk));
#pragma unroll
    for (int i = 0; i < Config::kWarpRows / 8; ++i) {
      ptx::cp_async_16(target + static_cast<std::uint32_t>(i * pass * kNonzeroRowBytes), from);
      from += pass * row_elements;
    }
  } else {
    ChunkWalk<4>::each(rows, [&](int row, int chunk) {
      const std::int64_t element = element0 + chunk * (kChunkBytes / Config::kElementBytes);
      const bool exists = element < row_elements;
      ptx::cp_async_16(nonzeros_address + static_cast<std::uint32_t>(swizzled_64(row, chunk)),
                       source + (exists ? source_row(row) * row_elements + element : 0), exists ? kChunkBytes : 0);
    });
  }
  // Word column c of the tile: `rows` words in a row, 16 bytes at a time.
  const std::uint32_t* words = p.weights.metadata + job.matrix * p.weights.metadata_words;
  const int word_columns = static_cast<int>(p.weights.places) / Config::kStepPlaces;
  const std::uint32_t metadata_address = ptx::shared_address(metadata);
  const int column = static_cast<int>(threadIdx.x) & 1;
  const int word_column = tile * 2 + column;
  const int valid = word_column < word_columns ? kChunkBytes : 0;
  for (int row = static_cast<int>(threadIdx.x) / 2 * 4; row < rows; row += static_cast<int>(blockDim.x) * 2) {
    ptx::cp_async_16(metadata_address + static_cast<std::uint32_t>((column * rows + row) * 4),
                     words + (valid > 0 ? static_cast<std::int64_t>(word_column) * matrix_rows + source_row(row) : 0),
                     valid);
  }
}

// The fragment of V for one step and block of 8 columns.
template <typename Element, int kHeadDim>
__device__ __forceinline__ void load_value_fragment(std::uint32_t (&fragment)[4], const char* values, int step,
                                                    int block) {
  using Config = PvConfig<Element, kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (Config::kFp32) {
    const float* column = reinterpret_cast<const float*>(values) + 8 * block + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = step * Config::kStepPlaces + 4 * i + lane % 4;
      fragment[i] = __float_as_uint(column[row * padded_floats(kHeadDim)]);
    }
  } else {
    // A block is an exclusive or away from block 0: the swizzle is one of the chunk index.
    const std::uint32_t row = ptx::shared_address(values + swizzled_wide(lane, 0, Config::kValueRowBytes));
    ptx::ldmatrix_x4_trans(fragment,
                           (row ^ static_cast<std::uint32_t>(block * kChunkBytes)) +
                               static_cast<std::uint32_t>(step * Config::kStepPlaces * Config::kValueRowBytes));
  }
}

// acc += one tile; `steps` is 1 or 2: how many halves of the tile the matrix has.
template <typename Element, int kHeadDim>
__device__ __forceinline__ void multiply(
    float (&acc)[PvConfig<Element, kHeadDim>::kRowBlocks][PvConfig<Element, kHeadDim>::kColumnBlocks][4],
    const char* nonzeros, const char* metadata, const char* values, int warp_row, int rows, int steps) {
  using Config = PvConfig<Element, kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t a_row = ptx::shared_address(nonzeros + swizzled_64(warp_row + lane % 16, lane / 16));
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    if (step >= steps) break;
    std::uint32_t a[Config::kRowBlocks][4];
    std::uint32_t codes[Config::kRowBlocks / 2];
#pragma unroll
    for (int m = 0; m < Config::kRowBlocks; ++m) {
      ptx::ldmatrix_x4(a[m], (a_row ^ static_cast<std::uint32_t>(step * kStepBytes)) +
                                 static_cast<std::uint32_t>(16 * m * kNonzeroRowBytes));
      if constexpr (Config::kFp32) {
#pragma unroll
        for (std::uint32_t& word : a[m]) word = ptx::round_tf32(word);
      }
    }
#pragma unroll
    for (int u = 0; u < Config::kRowBlocks / 2; ++u) {
      codes[u] = reinterpret_cast<const std::uint32_t*>(metadata)[step * rows + warp_row + kRowUnit * u + lane];
    }
#pragma unroll
    for (int block = 0; block < Config::kColumnBlocks; ++block) {
      std::uint32_t b[4];
      load_value_fragment<Element, kHeadDim>(b, values, step, block);
#pragma unroll
      for (int u = 0; u < Config::kRowBlocks / 2; ++u) {
        ptx::mma_sparse_64_bytes<Element, 0>(acc[2 * u][block], a[2 * u], b, codes[u]);
        ptx::mma_sparse_64_bytes<Element, 1>(acc[2 * u + 1][block], a[2 * u + 1], b, codes[u]);
      }
    }
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

// One row of a warp's results in whole 32-byte sectors: fp32 quads hold them; 16-bit lanes t and t ^ 1 trade words of
// two neighbouring blocks first.
template <typename Element, int kHeadDim, int kColumnBlocks>
__device__ __forceinline__ void store_row(const PvSparseParams& p, const PvJob& job, Element* out, bool exists,
                                          const float (&acc)[kColumnBlocks][4], int r) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  const int columns = p.v.extent - job.column0;  // that exist from column0 on
  if (!p.out_aligned || columns % 4 != 0) {
#pragma unroll
    for (int i = 0; i < 2 * kColumnBlocks; ++i) {
      const int column = 8 * (i / 2) + 2 * t + i % 2;
      if (exists && column < columns) out[column] = from_float<Element>(acc[i / 2][2 * r + i % 2]);
    }
    return;
  }
  if constexpr (sizeof(Element) == 4) {
#pragma unroll
    for (int block = 0; block < kColumnBlocks; ++block) {
      const int column = 8 * block + 2 * t;
      if (exists && column < columns) {
        *reinterpret_cast<float2*>(out + column) = make_float2(acc[block][2 * r], acc[block][2 * r + 1]);
      }
    }
  } else {
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
}

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__((PvConfig<Element, kHeadDim>::kMaxThreads), 2)
    pv_sparse_kernel(const __grid_constant__ PvSparseParams p) {
  using Config = PvConfig<Element, kHeadDim>;
  extern __shared__ __align__(1024) char shared[];
  const int rows = static_cast<int>(blockDim.x) / 32 * Config::kWarpRows;
  const PvJob job = pv_job<Config::kTile>(p, rows, kHeadDim);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * Config::kWarpRows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Element* gV = matrix_of<Element>(p.v, job.batch(p), job.head(p) / p.heads_per_kv);
  const auto nonzeros_of = [&](int stage) { return shared + stage * Config::stage_bytes(rows); };
  const auto values_of = [&](int stage) { return nonzeros_of(stage) + rows * kNonzeroRowBytes; };
  const auto metadata_of = [&](int stage) { return values_of(stage) + Config::kValueBytes; };
  const auto load = [&](int tile, int stage) {
    if (tile < job.end_tile) {
      load_weights<Element, kHeadDim>(p, job, tile, rows, nonzeros_of(stage), metadata_of(stage));
      load_values<Element, kHeadDim>(p, job, gV, tile, values_of(stage));
    }
    ptx::cp_async_commit();
  };

  float rOut[Config::kRowBlocks][Config::kColumnBlocks][4];
#pragma unroll
  for (int i = 0; i < Config::kRowBlocks * Config::kColumnBlocks * 4; ++i) {
    rOut[i / (Config::kColumnBlocks * 4)][i / 4 % Config::kColumnBlocks][i % 4] = 0.0f;
  }
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) load(job.first_tile + s, s);

  int stage = 0;
  const int stored_steps = static_cast<int>(p.weights.places / Config::kStepPlaces);
  for (int tile = job.first_tile; tile < job.end_tile; ++tile) {
    ptx::cp_async_wait<Config::kStages - 2>();
    if constexpr (Config::kFp32) {
      round_rows_tf32<Config::kValueChunks>(values_of(stage), Config::kTile, ValueOffset<Element, kHeadDim>());
    }
    __syncthreads();  // this tile's copies are visible to all; all have left the stage that is loaded next
    load(tile + Config::kStages - 1, stage == 0 ? Config::kStages - 1 : stage - 1);
    multiply<Element, kHeadDim>(rOut, nonzeros_of(stage), metadata_of(stage), values_of(stage), warp_row, rows,
                                min(2, stored_steps - 2 * tile));
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  ptx::cp_async_wait<0>();

#pragma unroll
  for (int i = 0; i < 2 * Config::kRowBlocks; ++i) {
    const std::int64_t row = job.row0 + warp_row + 8 * i + lane / 4;
    Element* out = static_cast<Element*>(p.out) + job.batch(p) * p.out_stride[0] + job.head(p) * p.out_stride[1] +
                   row * p.out_stride[2] + job.column0;
    store_row<Element, kHeadDim>(p, job, out, row < p.walk.n_q, rOut[i / 2], i % 2);
  }
}

}  // namespace dspattn::cuda::sm80
