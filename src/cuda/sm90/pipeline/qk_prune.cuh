// qk_prune on Hopper: the kernel of cuda/sm80/qk_prune with the products of wgmma, for 16-bit types and head dims up to
// 64.
//
// A tile of 64 places belongs to a warpgroup, two of them to a CTA; K stays in shared
// memory, Q streams through a ring of cp.async stages of 128 rows. A product covers 64 rows; its accumulators have the
// lane layout of mma.sync, so that the epilogue is the same. Rows are stored in shared memory so that a warp's 16 rows
// of the two products of a stage are 32 rows in a row: the metadata's unit. While the first half is selected and
// stored, the tensor core computes the second.
//
// Requires what cuda/sm80/qk_prune/kernel.cuh requires, and sm_90a.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_shapes.h"
#include "cuda/sm80/qk_prune/epilogue.h"
#include "cuda/sm90/pipeline/common.h"

namespace dspattn::cuda::sm90 {

using sm80::QkMasks;
using sm80::QkPruneParams;

template <typename Element>
struct QkConfig {
  static_assert(sizeof(Element) == 2);
  static constexpr int kRowBytes = 128;
  static constexpr int kChunks = kRowBytes / sm80::kChunkBytes;
  static constexpr int kTile = sm80::tile_places(sizeof(Element));
  static constexpr int kBlocks = kTile / 8;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kStageRows = 128;
  static constexpr int kStageBytes = kStageRows * kRowBytes;
  static constexpr int kStages = 3;
  static constexpr int kMaxGroups = 2;
  static constexpr int kMinCtas = 2;
  using Job = sm80::QkJob<kTile, kGroupThreads>;

  static constexpr int shared_bytes(int groups) { return groups * kTileBytes + kStages * kStageBytes; }
};

template <typename Element>
struct KeyOffset {
  __device__ __forceinline__ int operator()(int row, int chunk) const {
    return panel_offset(QkConfig<Element>::kTile, row, chunk);
  }
  __device__ static __forceinline__ int step(int rows) { return rows % 8 == 0 ? rows * kPanelBytes : 0; }
};

template <typename Element>
struct QueryOffset {
  __device__ __forceinline__ int operator()(int row, int chunk) const {
    return panel_offset(QkConfig<Element>::kStageRows, product_row(row), chunk);
  }
  // 32 rows on is the next warp's 16.
  __device__ static __forceinline__ int step(int rows) { return rows == 32 ? 16 * kPanelBytes : 0; }
};

// Issues acc = Q K^T of 64 rows by a tile; q and k are the low words of their first descriptors.
template <typename Element>
__device__ __forceinline__ void issue_product(float (&acc)[QkConfig<Element>::kBlocks * 4], std::uint32_t q,
                                              std::uint32_t k) {
  constexpr DType kType = std::is_same_v<Element, __half> ? DType::f16 : DType::bf16;
#pragma unroll
  for (int step = 0; step < kPanelBytes / sm80::kStepBytes; ++step) {
    const auto at = static_cast<std::uint32_t>(step * sm80::kStepBytes >> 4);
    if (step == 0) {
      ptx::wgmma_dense_first<kType>(acc, ptx::descriptor(q + at), ptx::descriptor(k + at));
    } else {
      ptx::wgmma_dense<kType>(acc, ptx::descriptor(q + at), ptx::descriptor(k + at));
    }
  }
  ptx::wgmma_commit();
}

template <typename Element, QkMasks kMasks>
__global__ void __launch_bounds__(kGroupThreads* QkConfig<Element>::kMaxGroups, QkConfig<Element>::kMinCtas)
    qk_prune_kernel(const __grid_constant__ QkPruneParams p) {
  using Config = QkConfig<Element>;
  using Job = typename Config::Job;
  extern __shared__ __align__(1024) char shared[];
  const Job job(p, blockIdx.x);
  if (job.first_tile >= job.end_tile) return;
  const sm80::RowRange rows = job_rows(p, job);
  if (rows.begin >= rows.end) return;
  char* sK = shared;
  char* sQ = shared + static_cast<int>(blockDim.x) / kGroupThreads * Config::kTileBytes;
  sm80::QueryStages<Element, Config::kChunks, Config::kStageRows, QueryOffset<Element>> queries(
      p, sm80::matrix_of<Element>(p.q, job.batch(p), job.head(p)), rows.begin);
  const auto load = [&](int row, int stage) {
    if (row < rows.end) queries.load(p, row, sQ + stage * Config::kStageBytes);
    ptx::cp_async_commit();
  };

  sm80::load_keys<Element, Config::kChunks>(p, job, sK, KeyOffset<Element>());
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) load(rows.begin + s * Config::kStageRows, s);
  ptx::cp_async_wait<Config::kStages - 2>();
  sm80::prepare_keys<Element, Config::kChunks>(p, job, sK, KeyOffset<Element>());

  const sm80::LaneTarget target = sm80::lane_target<Element>(p, job);
  const bool exists = job.own_tile() < job.end_tile;
  const bool whole = exists && job.keys(p, job.own_tile()).end <= static_cast<int>(p.walk.n_k);
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int warp_row = static_cast<int>(threadIdx.x) % kGroupThreads / 32 * sm80::kRowUnit;
  const std::uint32_t k_low =
      ptx::descriptor_low(ptx::shared_address(sK) + static_cast<std::uint32_t>(group * Config::kTileBytes), 16);
  const std::uint32_t q_low = ptx::descriptor_low(ptx::shared_address(sQ), 16);
  int stage = 0;
  for (int row = rows.begin; row < rows.end; row += Config::kStageRows) {
    ptx::cp_async_wait<Config::kStages - 2>();
    ptx::fence_async_proxy();
    __syncthreads();  // the tensor core sees this stage's copies (and K's); all have left the stage that is loaded next
    load(row + (Config::kStages - 1) * Config::kStageRows, stage == 0 ? Config::kStages - 1 : stage - 1);
    if (exists && (!p.walk.skip_masked || sm80::visits_tile<Job>(p, row))) {
      const std::uint32_t q_tile = q_low + static_cast<std::uint32_t>(stage * (Config::kStageBytes >> 4));
      float acc[2][Config::kBlocks * 4];
      ptx::wgmma_fence();
      issue_product<Element>(acc[0], q_tile, k_low);
      issue_product<Element>(acc[1], q_tile + (64 * kPanelBytes >> 4), k_low);
      const int row32 = row + warp_row;
      const bool all_visible = sm80::sees_all<Job, kMasks>(p, row32, whole);
      std::uint32_t metadata[2];
      ptx::wgmma_wait<1>();
      ptx::pin_accumulators(acc[0]);
      // Rows of the last stage may lie past the matrix; products are the warpgroup's, stores the warp's.
      const bool inside = row32 < rows.end;
      if (inside) {
        metadata[0] = sm80::finish_half<Element, Job, kMasks>(p, row32, all_visible, target,
                                                              reinterpret_cast<float(&)[Config::kBlocks][4]>(acc[0]));
      }
      ptx::wgmma_wait<0>();
      ptx::pin_accumulators(acc[1]);
      if (inside) {
        metadata[1] = sm80::finish_half<Element, Job, kMasks>(p, row32 + 16, all_visible, target,
                                                              reinterpret_cast<float(&)[Config::kBlocks][4]>(acc[1]));
        sm80::store_metadata(target, row32, metadata);
      }
    }
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  ptx::cp_async_wait<0>();
}

}  // namespace dspattn::cuda::sm90
