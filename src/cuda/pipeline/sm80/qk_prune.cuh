// qk_prune: S = scale * Q K^T pruned to 2:4 or 1:2 where it is computed. The dense scores live in registers only.
//
// A CTA takes up to eight tiles of keys of one (batch, head), one per warp (64 keys of a 16-bit type, 32 of fp32: 64
// bytes of nonzeros a row), and walks over its query rows. K stays: in registers for d <= 64, in shared memory above;
// its rows are permuted (tile_maps.h) so that each lane's accumulators are whole groups, and four groups in a row. Q
// streams through a ring of cp.async stages. The epilogue selects and encodes in registers; each lane then stores 16
// bytes of nonzeros per row, so that the CTA writes up to 512 bytes in a row at a time, and after one shuffle each warp
// stores whole 128-byte lines of metadata.
//
// Requires: places of the matrix in whole metadata words, rows padded to 32, head dim <= kHeadDim.
#pragma once

#include <cstdint>

#include "cuda/pipeline/common/qk_epilogue.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::pipeline {

template <typename Element, int kHeadDim>
struct QkConfig {
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr int kRowBytes = kHeadDim * kElementBytes;
  static constexpr int kChunks = kRowBytes / kChunkBytes;
  static constexpr int kTile = tile_places(kElementBytes);
  static constexpr int kBlocks = kTile / 8;  // accumulator blocks of 8 columns
  static constexpr int kSteps = kRowBytes / kStepBytes;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kMaxWarps = kHeadDim == 64 ? 4 : 512 / kHeadDim;  // 64 KiB of K
  static constexpr int kMinCtas = kHeadDim == 64 ? 3 : 2;
  static constexpr bool kKInRegisters = kTileBytes <= 8192;  // 64 registers
  static constexpr int kStageRows = kRowBytes <= 128 ? 64 : 32;
  static constexpr int kStageBytes = kStageRows * kRowBytes;
  static constexpr int kStages = kRowBytes <= 256 ? 3 : 2;  // 2 keeps d = 256 inside the 99 KiB of sm_89
  // 16-row halves multiplied at once: two share a K fragment that is read from shared memory, and give short tiles
  // enough independent sums.
  static constexpr int kHalvesAtOnce = kKInRegisters && kElementBytes == 2 ? 1 : 2;
  using Job = QkJob<kTile, 32>;

  static constexpr int shared_bytes(int warps) { return warps * kTileBytes + kStages * kStageBytes; }
};

// Q and K tiles: rows of kRowBytes, swizzled; K tiles of kRows rows.
template <int kRowBytes, int kRows>
struct TileOffset {
  __device__ __forceinline__ int operator()(int row, int chunk) const { return swizzled_wide(row, chunk, kRowBytes); }
  __device__ static __forceinline__ int step(int rows) { return rows % 8 == 0 ? rows * kRowBytes : 0; }
  __device__ static __forceinline__ int tile(int index) { return index * kRows * kRowBytes; }
};

// The warp's K: fragments of step s and column blocks 2p, 2p + 1. Where they do not fit in registers they are read from
// shared memory each time.
template <typename Element, int kHeadDim>
struct KeyFragments {
  using Config = QkConfig<Element, kHeadDim>;
  static constexpr int kPairs = Config::kBlocks / 2;
  std::uint32_t kept[Config::kKInRegisters ? Config::kSteps : 1][kPairs][4];
  std::uint32_t row;  // address of this lane's row for ldmatrix at step 0

  // Another step is an exclusive or with step * 32: the swizzle is one of the chunk index, and tiles are aligned to a
  // whole row.
  __device__ __forceinline__ KeyFragments(const QkPruneParams& p, const char* tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    row = ptx::shared_address(tile + swizzled_wide(lane / 16 * 8 + lane % 8, lane / 8 % 2, Config::kRowBytes));
    if constexpr (Config::kKInRegisters) {
#pragma unroll
      for (int i = 0; i < Config::kSteps * kPairs; ++i) {
        load(kept[i / kPairs][i % kPairs], i / kPairs, i % kPairs);
#pragma unroll
        for (std::uint32_t& word : kept[i / kPairs][i % kPairs]) prepare_fragment<Element>(p, word);
      }
    }
  }

  __device__ __forceinline__ void load(std::uint32_t (&fragment)[4], int step, int pair) const {
    ptx::ldmatrix_x4(fragment, (row ^ static_cast<std::uint32_t>(step * kStepBytes)) +
                                   static_cast<std::uint32_t>(16 * pair * Config::kRowBytes));
  }

  __device__ __forceinline__ const std::uint32_t (&at(int step, int pair))[4] {
    if constexpr (Config::kKInRegisters) {
      return kept[step][pair];
    } else {
      load(kept[0][pair], step, pair);
      return kept[0][pair];
    }
  }
};

// acc = Q K^T of kHalvesAtOnce times 16 rows. q_row: the address of this lane's row of Q for ldmatrix at step 0; lanes
// 0-15 address the rows' first 16 bytes, lanes 16-31 the second.
template <typename Element, int kHeadDim>
__device__ __forceinline__ void multiply(
    float (&acc)[QkConfig<Element, kHeadDim>::kHalvesAtOnce][QkConfig<Element, kHeadDim>::kBlocks][4],
    std::uint32_t q_row, KeyFragments<Element, kHeadDim>& keys) {
  using Config = QkConfig<Element, kHeadDim>;
#pragma unroll
  for (int step = 0; step < Config::kSteps; ++step) {
    std::uint32_t q[Config::kHalvesAtOnce][4];
#pragma unroll
    for (int i = 0; i < Config::kHalvesAtOnce; ++i) {
      ptx::ldmatrix_x4(q[i], (q_row ^ static_cast<std::uint32_t>(step * kStepBytes)) +
                                 static_cast<std::uint32_t>(16 * i * Config::kRowBytes));
    }
#pragma unroll
    for (int pair = 0; pair < Config::kBlocks / 2; ++pair) {
      const std::uint32_t(&k)[4] = keys.at(step, pair);
#pragma unroll
      for (int i = 0; i < Config::kHalvesAtOnce; ++i) {
        if (step == 0) {
          ptx::mma_32_bytes_from_zero<Element>(acc[i][2 * pair], q[i], k[0], k[1]);
          ptx::mma_32_bytes_from_zero<Element>(acc[i][2 * pair + 1], q[i], k[2], k[3]);
        } else {
          ptx::mma_32_bytes<Element>(acc[i][2 * pair], q[i], k[0], k[1]);
          ptx::mma_32_bytes<Element>(acc[i][2 * pair + 1], q[i], k[2], k[3]);
        }
      }
    }
  }
}

// The scores of 32 rows: row32 of the matrix, q_row of shared memory.
template <typename Element, int kHeadDim, QkMasks kMasks>
__device__ __forceinline__ void prune_rows(const QkPruneParams& p, const LaneTarget& target, int row32,
                                           bool all_visible, std::uint32_t q_row,
                                           KeyFragments<Element, kHeadDim>& keys) {
  using Config = QkConfig<Element, kHeadDim>;
  std::uint32_t metadata[2];
#pragma unroll
  for (int first = 0; first < 2; first += Config::kHalvesAtOnce) {
    float rScores[Config::kHalvesAtOnce][Config::kBlocks][4];
    multiply<Element, kHeadDim>(rScores, q_row + static_cast<std::uint32_t>(16 * first * Config::kRowBytes), keys);
#pragma unroll
    for (int i = 0; i < Config::kHalvesAtOnce; ++i) {
      metadata[first + i] = finish_half<Element, typename Config::Job, kMasks>(p, row32 + 16 * (first + i), all_visible,
                                                                               target, rScores[i]);
    }
  }
  store_metadata(target, row32, metadata);
}

template <typename Element, int kHeadDim, QkMasks kMasks>
__global__ void __launch_bounds__(32 * QkConfig<Element, kHeadDim>::kMaxWarps, QkConfig<Element, kHeadDim>::kMinCtas)
    qk_prune_kernel(const __grid_constant__ QkPruneParams p) {
  using Config = QkConfig<Element, kHeadDim>;
  using Job = typename Config::Job;
  using Offset = TileOffset<Config::kRowBytes, Config::kTile>;
  DSPATTN_ALIGNED_SHARED(char, shared, 1024);
  const Job job(p, blockIdx.x);
  if (job.first_tile >= job.end_tile) return;
  const RowRange rows = job_rows(p, job);
  if (rows.begin >= rows.end) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  char* sK = shared;
  char* sQ = shared + static_cast<int>(blockDim.x) / 32 * Config::kTileBytes;
  QueryStages<Element, Config::kChunks, Config::kStageRows, Offset> queries(
      p, matrix_of<Element>(p.q, job.batch(p), job.head(p)), rows.begin);
  const auto load = [&](int row, int stage) {
    if (row < rows.end) queries.load(p, row, sQ + stage * Config::kStageBytes);
    ptx::cp_async_commit();
  };

  load_keys<Element, Config::kChunks>(p, job, sK, Offset());
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) load(rows.begin + s * Config::kStageRows, s);
  ptx::cp_async_wait<Config::kStages - 2>();
  if constexpr (!Config::kKInRegisters) prepare_keys<Element, Config::kChunks>(p, job, sK, Offset());
  __syncthreads();  // K, copied with the first stage of Q, is visible to all
  // A warp past the matrix holds whatever is there; it multiplies nothing.
  KeyFragments<Element, kHeadDim> keys(p, sK + static_cast<int>(threadIdx.x) / 32 * Config::kTileBytes);

  const LaneTarget target = lane_target<Element>(p, job);
  const bool exists = job.own_tile() < job.end_tile;
  const bool whole = exists && job.keys(p, job.own_tile()).end <= static_cast<int>(p.walk.n_k);
  int stage = 0;
  for (int row = rows.begin; row < rows.end; row += Config::kStageRows) {
    ptx::cp_async_wait<Config::kStages - 2>();
    char* stage_rows = sQ + stage * Config::kStageBytes;
    if constexpr (Config::kElementBytes == 4) {
      round_rows_tf32<Config::kChunks>(stage_rows, Config::kStageRows, Offset());
    }
    __syncthreads();  // this stage's copies are visible to all; all have left the stage that is loaded next
    load(row + (Config::kStages - 1) * Config::kStageRows, stage == 0 ? Config::kStages - 1 : stage - 1);
    const bool active = exists && (!p.walk.skip_masked || visits_tile<Job>(p, row));
    const int end = active ? min(Config::kStageRows, rows.end - row) : 0;
    const std::uint32_t q_row =
        ptx::shared_address(stage_rows + swizzled_wide(lane % 16, lane / 16, Config::kRowBytes));
#pragma unroll 1
    for (int unit = 0; unit < end; unit += kRowUnit) {
      prune_rows<Element, kHeadDim, kMasks>(p, target, row + unit, sees_all<Job, kMasks>(p, row + unit, whole),
                                            q_row + static_cast<std::uint32_t>(unit * Config::kRowBytes), keys);
    }
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  ptx::cp_async_wait<0>();
}

}  // namespace dspattn::cuda::pipeline
