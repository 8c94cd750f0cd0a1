// pv_sparse on Hopper: the product of cuda/sm80/pv_sparse with wgmma.sp, for d_v up to 64.
//
// A warpgroup takes 128 rows by all columns of one (batch, head), two warpgroups a CTA, and walks over tiles of 128
// bytes of nonzeros a row (128 places of a 16-bit type, 64 of fp32). Nonzeros, metadata and V stream through a ring of
// cp.async stages. A product has 64 rows, 16 of each warp; the two products of a warpgroup are the halves of the warps'
// 32-row units, so that lane l's metadata is word l of its unit as in memory and the half is the sparsity selector.
// Nonzeros come from registers, V from shared memory: 16-bit V as it is; tf32 operands must be K-major, so fp32 V is
// transposed (and rounded) in shared memory, two tiles in turn.
//
// Requires what cuda/sm80/pv_sparse/kernel.cuh requires, and sm_90a.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/single.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_shapes.h"
#include "cuda/ptx/wgmma_tf32_shapes.h"
#include "cuda/sm80/pv_sparse/job.h"
#include "cuda/sm90/pipeline/common.h"

namespace dspattn::cuda::sm90 {

using sm80::PvJob;
using sm80::PvSparseParams;

template <typename Element>
struct PvConfig {
  static constexpr bool kFp32 = sizeof(Element) == 4;
  static constexpr int kColumns = 64;
  static constexpr int kWeightBytes = 128;
  static constexpr int kWeightChunks = kWeightBytes / sm80::kChunkBytes;
  static constexpr int kTile = kWeightBytes / static_cast<int>(sizeof(Element)) * 2;
  static constexpr int kStepPlaces = sm80::places_per_word_column(sizeof(Element));
  static constexpr int kSteps = kTile / kStepPlaces;
  static constexpr int kGroupRows = 128;
  static constexpr int kValueRowBytes = kColumns * static_cast<int>(sizeof(Element));
  static constexpr int kValueChunks = kValueRowBytes / sm80::kChunkBytes;
  static constexpr int kValueBytes = kTile * kValueRowBytes;
  static constexpr int kTransposedBytes = kFp32 ? 2 * kValueBytes : 0;
  static constexpr int kStages = 3;

  static DSPATTN_HOST_DEVICE constexpr int stage_bytes(int rows) {
    return rows * kWeightBytes + kValueBytes + rows * 4 * kSteps;
  }
  static DSPATTN_HOST_DEVICE constexpr int shared_bytes(int rows) {
    return kTransposedBytes + kStages * stage_bytes(rows);
  }
};

struct WeightOffset {
  __device__ __forceinline__ int operator()(int row, int chunk) const {
    return sm80::swizzled_wide(row, chunk, kPanelBytes);
  }
};

// 16-bit V as wgmma reads it; fp32 V as it is, to be transposed.
template <typename Element>
struct ValueOffset {
  __device__ __forceinline__ int operator()(int row, int chunk) const {
    return PvConfig<Element>::kFp32 ? row * PvConfig<Element>::kValueRowBytes + chunk * sm80::kChunkBytes
                                    : sm80::swizzled_wide(row, chunk, kPanelBytes);
  }
};

// Columns of V become rows of `to`, in panels of 32 places; each thread takes a column, four places at a time. Lanes
// are neighbouring columns: neither the reads nor the swizzled writes meet in a bank.
__device__ __forceinline__ void transpose_values(const char* from, char* to) {
  using Config = PvConfig<float>;
  const int column = static_cast<int>(threadIdx.x) % Config::kColumns;
  const int step = static_cast<int>(blockDim.x) / Config::kColumns;
#pragma unroll 2
  for (int quad = static_cast<int>(threadIdx.x) / Config::kColumns; quad < Config::kTile / 4; quad += step) {
    const auto* word = reinterpret_cast<const float*>(from) + quad * 4 * Config::kColumns + column;
    uint4 places;
    places.x = ptx::nearest_tf32(word[0 * Config::kColumns]);
    places.y = ptx::nearest_tf32(word[1 * Config::kColumns]);
    places.z = ptx::nearest_tf32(word[2 * Config::kColumns]);
    places.w = ptx::nearest_tf32(word[3 * Config::kColumns]);
    *reinterpret_cast<uint4*>(to + panel_offset(Config::kColumns, column, quad)) = places;
  }
}

// What one warp multiplies in one step: the nonzeros of its two halves, and their metadata.
struct WeightFragments {
  std::uint32_t nonzeros[2][4];
  std::uint32_t metadata;
};

template <typename Element>
__device__ __forceinline__ void load_fragments(WeightFragments& f, std::uint32_t nonzero_row, std::uint32_t metadata,
                                               int rows, int step) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ptx::ldmatrix_x4(f.nonzeros[half], (nonzero_row ^ static_cast<std::uint32_t>(step * sm80::kStepBytes)) +
                                           static_cast<std::uint32_t>(16 * half * kPanelBytes));
    if constexpr (PvConfig<Element>::kFp32) {
#pragma unroll
      for (std::uint32_t& word : f.nonzeros[half]) word = ptx::nearest_tf32(__uint_as_float(word));
    }
  }
  f.metadata = ptx::load_shared(metadata + static_cast<std::uint32_t>(4 * step * rows));
}

// Issues the two products of a step. `values`: the tile of V, transposed if fp32.
template <typename Element>
__device__ __forceinline__ void issue_step(float (&acc)[2][32], const WeightFragments& f, std::uint32_t values,
                                           int step) {
  using Config = PvConfig<Element>;
  if constexpr (Config::kFp32) {
    // 64 bytes of places a step, two steps a panel.
    const std::uint32_t at = values + static_cast<std::uint32_t>(step / 2 * Config::kColumns * kPanelBytes +
                                                                 step % 2 * 2 * sm80::kStepBytes);
    const std::uint64_t b = ptx::descriptor(ptx::descriptor_low(at, 16));
    ptx::wgmma_tf32_sparse<0>(acc[0], f.nonzeros[0], b, f.metadata, 1);
    ptx::wgmma_tf32_sparse<1>(acc[1], f.nonzeros[1], b, f.metadata, 1);
  } else {
    constexpr DType kType = std::is_same_v<Element, __half> ? DType::f16 : DType::bf16;
    const std::uint32_t at = values + static_cast<std::uint32_t>(step * Config::kStepPlaces * kPanelBytes);
    const std::uint64_t b = ptx::descriptor(ptx::descriptor_low(at, Config::kValueBytes));
    const std::uint32_t(&a)[2][4] = f.nonzeros;
    ptx::wgmma_sparse<kType, 0>(acc[0], a[0][0], a[0][1], a[0][2], a[0][3], b, f.metadata, 1);
    ptx::wgmma_sparse<kType, 1>(acc[1], a[1][0], a[1][1], a[1][2], a[1][3], b, f.metadata, 1);
  }
}

// The operands of a CTA of kGroups warpgroups, tile by tile: streams where whole tiles exist, else piece by piece.
template <typename Element, int kGroups>
struct TileLoader {
  using Config = PvConfig<Element>;
  static constexpr int kRows = kGroups * Config::kGroupRows;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kValuePasses = Config::kTile * Config::kValueChunks / kThreads;
  static_assert(kRows == kThreads, "one chunk of metadata a thread");
  const Element* v;
  sm80::RowStream<kRows * Config::kWeightChunks / kThreads> nonzeros;
  sm80::RowStream<1> metadata;
  sm80::RowStream<kValuePasses> values;
  int weights_end = 0, values_end = 0;  // places up to which tiles are streamed

  __device__ __forceinline__ TileLoader(const PvSparseParams& p, const PvJob& job)
      : v(sm80::matrix_of<Element>(p.v, job.batch(p), job.head(p) / p.heads_per_kv)) {
    const int thread = static_cast<int>(threadIdx.x);
    if (job.row0 + kRows <= static_cast<int>(p.weights.rows)) {
      constexpr int kPass = kThreads / Config::kWeightChunks;
      const int row = thread / Config::kWeightChunks, chunk = thread % Config::kWeightChunks;
      const std::int64_t row_bytes = p.weights.places / 2 * static_cast<int>(sizeof(Element));
      nonzeros.from = static_cast<const char*>(p.weights.nonzeros) +
                      (job.matrix * p.weights.rows + job.row0 + row) * row_bytes +
                      job.first_place / 2 * static_cast<int>(sizeof(Element)) + chunk * sm80::kChunkBytes;
      nonzeros.pass_bytes = kPass * row_bytes;
      nonzeros.tile_bytes = Config::kWeightBytes;
      nonzeros.to = static_cast<std::uint32_t>(WeightOffset()(row, chunk));
      nonzeros.to_step = kPass * kPanelBytes;
      const int column = thread % Config::kSteps, first = thread / Config::kSteps * 4;
      metadata.from = reinterpret_cast<const char*>(p.weights.metadata + job.matrix * p.weights.metadata_words +
                                                    (job.first_place / Config::kStepPlaces + column) * p.weights.rows +
                                                    job.row0 + first);
      metadata.tile_bytes = 4 * Config::kSteps * p.weights.rows;
      metadata.to = static_cast<std::uint32_t>(4 * (column * kRows + first));
      weights_end = job.end_place;
    }
    // The keys of one tile to the next are kTile apart if the grouping is consecutive or a tile is a block.
    if (p.v.advance > 0 && p.walk.columns == nullptr && (!p.interleaved || Config::kTile == kInterleaveBlock)) {
      constexpr int kPass = kThreads / Config::kValueChunks;
      const int row = thread / Config::kValueChunks, chunk = thread % Config::kValueChunks;
      const std::int64_t row_bytes = p.v.row_stride * static_cast<int>(sizeof(Element));
      const int key = job.first_place + sm80::key_in_block(row, p.group_log2, p.interleaved);
      values.from = reinterpret_cast<const char*>(v) + key * row_bytes + chunk * sm80::kChunkBytes;
      values.pass_bytes = p.v.advance * row_bytes;
      values.tile_bytes = Config::kTile * row_bytes;
      values.to = static_cast<std::uint32_t>(ValueOffset<Element>()(row, chunk));
      values.to_step = kPass * Config::kValueRowBytes;
      values_end = min(job.key_length, job.end_place);
    }
  }

  // Tiles in ascending order.
  __device__ __forceinline__ void load(const PvSparseParams& p, const PvJob& job, int place, char* to_nonzeros,
                                       char* to_values, char* to_metadata) {
    if (place + Config::kTile <= weights_end) {
      nonzeros.copy(ptx::shared_address(to_nonzeros));
      metadata.copy(ptx::shared_address(to_metadata));
    } else {
      sm80::load_nonzeros<Element, Config::kWeightChunks>(p, job, place, kRows, to_nonzeros, WeightOffset());
      sm80::load_metadata<Config::kSteps, Config::kStepPlaces>(p, job, place, kRows, to_metadata);
    }
    if (place + Config::kTile <= values_end) {
      values.copy(ptx::shared_address(to_values));
    } else {
      sm80::load_values<Element, Config::kValueChunks, Config::kTile>(p, job, v, place, to_values,
                                                                      Config::kValueRowBytes, ValueOffset<Element>());
    }
  }
};

template <typename Element, int kGroups>
__global__ void __launch_bounds__(kGroupThreads* kGroups, 1)
    pv_sparse_kernel(const __grid_constant__ PvSparseParams p) {
  using Config = PvConfig<Element>;
  constexpr int rows = kGroups * Config::kGroupRows;
  extern __shared__ __align__(1024) char shared[];
  const PvJob job = sm80::pv_job(p, rows, Config::kColumns);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * sm80::kRowUnit;
  char* ring = shared + Config::kTransposedBytes;
  const auto nonzeros_of = [&](int stage) { return ring + stage * Config::stage_bytes(rows); };
  const auto values_of = [&](int stage) { return nonzeros_of(stage) + rows * Config::kWeightBytes; };
  const auto metadata_of = [&](int stage) { return values_of(stage) + Config::kValueBytes; };
  TileLoader<Element, kGroups> tiles(p, job);
  const auto load = [&](int place, int stage) {
    if (place < job.end_place) tiles.load(p, job, place, nonzeros_of(stage), values_of(stage), metadata_of(stage));
    ptx::cp_async_commit();
  };

  float acc[2][32];
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i / 32][i % 32] = 0.0f;
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) load(job.first_place + s * Config::kTile, s);

  int stage = 0, turn = 0;
  for (int place = job.first_place; place < job.end_place; place += Config::kTile) {
    ptx::cp_async_wait<Config::kStages - 2>();
    ptx::fence_async_proxy();
    __syncthreads();  // this tile's copies are visible to all; all have left the stage that is loaded next
    load(place + (Config::kStages - 1) * Config::kTile, stage == 0 ? Config::kStages - 1 : stage - 1);
    std::uint32_t values = ptx::shared_address(values_of(stage));
    if constexpr (Config::kFp32) {
      char* transposed = shared + turn * Config::kValueBytes;
      transpose_values(values_of(stage), transposed);
      values = ptx::shared_address(transposed);
      turn ^= 1;
      ptx::fence_async_proxy();
      __syncthreads();  // the tensor core sees the transposed tile; the other one is free since the barrier above
    }
    const std::uint32_t nonzero_row =
        ptx::shared_address(nonzeros_of(stage) + WeightOffset()(warp_row + lane % 16, lane / 16));
    const std::uint32_t metadata =
        ptx::shared_address(metadata_of(stage)) + static_cast<std::uint32_t>(4 * (warp_row + lane));
    const int steps = (job.end_place - place) / Config::kStepPlaces;
    if (steps >= Config::kSteps) {
      WeightFragments f[Config::kSteps];
#pragma unroll
      for (int step = 0; step < Config::kSteps; ++step) {
        load_fragments<Element>(f[step], nonzero_row, metadata, rows, step);
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < Config::kSteps; ++step) issue_step<Element>(acc, f[step], values, step);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
    } else {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        WeightFragments f;
        load_fragments<Element>(f, nonzero_row, metadata, rows, step);
        ptx::wgmma_fence();
        issue_step<Element>(acc, f, values, step);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
      }
    }
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  ptx::cp_async_wait<0>();
  ptx::pin_accumulators(acc[0]);
  ptx::pin_accumulators(acc[1]);

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::int64_t row = job.row0 + warp_row + 8 * i + lane / 4;
    Element* out = static_cast<Element*>(p.out) + job.batch(p) * p.out_stride[0] + job.head(p) * p.out_stride[1] +
                   row * p.out_stride[2];
    sm80::store_row<Element>(p, job, out, row < p.walk.n_q, reinterpret_cast<float(&)[8][4]>(acc[i / 2]), i % 2);
  }
}

}  // namespace dspattn::cuda::sm90
