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

#include "cuda/pipeline/common/pv_job.h"

namespace dspattn::cuda::pipeline {

template <typename Element, int kHeadDim>
struct PvConfig {
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr bool kFp32 = kElementBytes == 4;
  static constexpr int kWeightBytes = 64;  // of nonzeros a row and tile
  static constexpr int kWeightChunks = kWeightBytes / kChunkBytes;
  static constexpr int kTile = kWeightBytes / kElementBytes * 2;  // places
  static constexpr int kStepPlaces = places_per_word_column(kElementBytes);
  static constexpr int kSteps = kTile / kStepPlaces;
  // 128 accumulator registers either way; more rows per warp read V from shared memory less often.
  static constexpr int kWarpRows = kHeadDim == 64 ? 64 : 32;
  static constexpr int kMaxThreads = 128;
  static constexpr int kMinCtas = 2;
  static constexpr int kRowBlocks = kWarpRows / 16;
  static constexpr int kColumnBlocks = kHeadDim / 8;
  static constexpr int kValueRowBytes = kFp32 ? padded_floats(kHeadDim) * 4 : kHeadDim * kElementBytes;
  static constexpr int kValueBytes = kTile * kValueRowBytes;
  static constexpr int kValueChunks = kHeadDim * kElementBytes / kChunkBytes;
  static constexpr int kStages = 3;

  static DSPATTN_HOST_DEVICE constexpr int metadata_bytes(int rows) { return rows * 4 * kSteps; }
  static DSPATTN_HOST_DEVICE constexpr int stage_bytes(int rows) {
    return rows * kWeightBytes + kValueBytes + metadata_bytes(rows);
  }
  static DSPATTN_HOST_DEVICE constexpr int shared_bytes(int rows) { return kStages * stage_bytes(rows); }

  // Where a chunk of nonzeros lies.
  struct WeightOffset {
    DSPATTN_HOST_DEVICE constexpr int operator()(int row, int chunk) const { return swizzled_64(row, chunk); }
  };
};

// Where a chunk of a V row lies. fp32 rows are padded instead of swizzled: they are read word by word.
template <typename Element, int kHeadDim>
struct ValueOffset {
  using Config = PvConfig<Element, kHeadDim>;
  __device__ __forceinline__ int operator()(int row, int chunk) const {
    return Config::kFp32 ? row * Config::kValueRowBytes + chunk * kChunkBytes
                         : swizzled_wide(row, chunk, Config::kValueRowBytes);
  }
};

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

// acc += one tile, of which the job has `steps` word columns.
template <typename Element, int kHeadDim>
__device__ __forceinline__ void multiply(
    float (&acc)[PvConfig<Element, kHeadDim>::kRowBlocks][PvConfig<Element, kHeadDim>::kColumnBlocks][4],
    const char* nonzeros, const char* metadata, const char* values, int warp_row, int rows, int steps) {
  using Config = PvConfig<Element, kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t a_row =
      ptx::shared_address(nonzeros + typename Config::WeightOffset()(warp_row + lane % 16, lane / 16));
#pragma unroll
  for (int step = 0; step < Config::kSteps; ++step) {
    if (step >= steps) break;
    std::uint32_t a[Config::kRowBlocks][4];
    std::uint32_t codes[Config::kRowBlocks / 2];
#pragma unroll
    for (int m = 0; m < Config::kRowBlocks; ++m) {
      ptx::ldmatrix_x4(a[m], (a_row ^ static_cast<std::uint32_t>(step * kStepBytes)) +
                                 static_cast<std::uint32_t>(16 * m * Config::kWeightBytes));
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

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__((PvConfig<Element, kHeadDim>::kMaxThreads), (PvConfig<Element, kHeadDim>::kMinCtas))
    pv_sparse_kernel(const __grid_constant__ PvSparseParams p) {
  using Config = PvConfig<Element, kHeadDim>;
  using WeightOffset = typename Config::WeightOffset;
  DSPATTN_ALIGNED_SHARED(char, shared, 1024);
  const int rows = static_cast<int>(blockDim.x) / 32 * Config::kWarpRows;
  const PvJob job = pv_job(p, static_cast<int>(blockIdx.x), rows, kHeadDim);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * Config::kWarpRows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Element* gV = matrix_of<Element>(p.v, job.batch(p), job.head(p) / p.heads_per_kv);
  const auto nonzeros_of = [&](int stage) { return shared + stage * Config::stage_bytes(rows); };
  const auto values_of = [&](int stage) { return nonzeros_of(stage) + rows * Config::kWeightBytes; };
  const auto metadata_of = [&](int stage) { return values_of(stage) + Config::kValueBytes; };
  const auto load = [&](int place, int stage) {
    if (place < job.end_place) {
      load_nonzeros<Element, Config::kWeightChunks>(p, job, place, rows, nonzeros_of(stage), WeightOffset());
      load_metadata<Config::kSteps, Config::kStepPlaces>(p, job, place, rows, metadata_of(stage));
      load_values<Element, Config::kValueChunks, Config::kTile>(
          p, job, gV, place, values_of(stage), Config::kValueRowBytes, ValueOffset<Element, kHeadDim>());
    }
    ptx::cp_async_commit();
  };

  float rOut[Config::kRowBlocks][Config::kColumnBlocks][4];
#pragma unroll
  for (int i = 0; i < Config::kRowBlocks * Config::kColumnBlocks * 4; ++i) {
    rOut[i / (Config::kColumnBlocks * 4)][i / 4 % Config::kColumnBlocks][i % 4] = 0.0f;
  }
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) load(job.first_place + s * Config::kTile, s);

  int stage = 0;
  for (int place = job.first_place; place < job.end_place; place += Config::kTile) {
    ptx::cp_async_wait<Config::kStages - 2>();
    const int steps = min(Config::kSteps, (job.end_place - place) / Config::kStepPlaces);
    if constexpr (Config::kFp32) {
      round_rows_tf32<Config::kValueChunks>(values_of(stage), steps * Config::kStepPlaces,
                                            ValueOffset<Element, kHeadDim>());
    }
    __syncthreads();  // this tile's copies are visible to all; all have left the stage that is loaded next
    load(place + (Config::kStages - 1) * Config::kTile, stage == 0 ? Config::kStages - 1 : stage - 1);
    multiply<Element, kHeadDim>(rOut, nonzeros_of(stage), metadata_of(stage), values_of(stage), warp_row, rows, steps);
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  ptx::cp_async_wait<0>();

#pragma unroll
  for (int i = 0; i < 2 * Config::kRowBlocks; ++i) {
    store_row<Element>(p, job, job.row0 + warp_row + 8 * i + lane / 4, rOut[i / 2], i % 2);
  }
}

}  // namespace dspattn::cuda::pipeline
