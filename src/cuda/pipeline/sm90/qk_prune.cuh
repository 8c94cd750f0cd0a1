// qk_prune on Hopper: the kernel of cuda/pipeline/sm80/qk_prune.cuh with the products of wgmma, for head dims up to 64.
//
// A warpgroup has 64 places (one tile of a 16-bit type, two of fp32), a CTA kGroups of them; K stays in shared memory,
// Q streams through a ring of stages of 64 or 128 rows that TMA fills (and rounds to tf32). Warpgroups run through the
// ring independently of each other: what hides a product's latency are the other warpgroups of the multiprocessor. A
// product's accumulators have the lane layout of mma.sync, so that the epilogue is the same; a warp has 16 rows of it,
// half a unit of the metadata, and its lanes store their words as they are.
//
// Requires what cuda/pipeline/sm80/qk_prune.cuh requires, Q that TMA can address, and sm_90a.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/pipeline/common/qk_epilogue.h"
#include "cuda/pipeline/sm90/common.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_shapes.h"
#include "cuda/ptx/wgmma_tf32_shapes.h"

namespace dspattn::cuda::pipeline::sm90 {

struct QkLaunch {
  QkPruneParams common;
  CUtensorMap q;  // (column, row, head, batch), boxes of a panel by kStageRows
};

template <typename Element, QkMasks kMasks>
struct QkConfig {
  static constexpr bool kFp32 = sizeof(Element) == 4;
  static constexpr int kRowBytes = 64 * static_cast<int>(sizeof(Element));
  static constexpr int kPanels = kRowBytes / kPanelBytes;
  static constexpr int kChunks = kRowBytes / kChunkBytes;
  static constexpr int kPlaces = 64;  // of a warpgroup
  static constexpr int kTile = tile_places(sizeof(Element));
  static constexpr int kTiles = kPlaces / kTile;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kKeyBytes = kPlaces * kRowBytes;
  static constexpr int kStageRows = kFp32 ? 64 : 128;  // one product or two: 16 KiB
  static constexpr int kStageBytes = kStageRows * kRowBytes;
  static constexpr int kStages = kFp32 ? 4 : 2;
  static constexpr int kGroups = 2;
  // More warps hide more: of 16-bit types as many as registers allow, of fp32 as shared memory does. Masks need the
  // registers.
  static constexpr int kMinCtas = kMasks == QkMasks::none && !kFp32 ? 4 : 2;
  using Job = QkJob<kTile, kGroupThreads, kTiles>;

  // K, the stages, two barriers a stage.
  static constexpr int shared_bytes(int groups) { return groups * kKeyBytes + kStages * (kStageBytes + 16); }
};

// A warpgroup's K: panel by panel, each of its 64 places' rows. Tiles are copied one by one; `tile` bytes into the
// first panel is where load_keys puts the next.
template <typename Config>
struct KeyOffset {
  __device__ __forceinline__ int operator()(int row, int chunk) const {
    return panel_offset(Config::kPlaces, row, chunk);
  }
  __device__ static __forceinline__ int step(int rows) { return rows % 8 == 0 ? rows * kPanelBytes : 0; }
  __device__ static __forceinline__ int tile(int index) {
    return index / Config::kTiles * Config::kKeyBytes + index % Config::kTiles * Config::kTile * kPanelBytes;
  }
};

// acc = Q K^T of 64 rows by 64 places; q and k are the low words of their first descriptors. kRows: rows of Q that lie
// together, panel by panel.
template <typename Element, int kRows>
__device__ __forceinline__ void multiply(float (&acc)[32], std::uint32_t q, std::uint32_t k) {
  constexpr int kSteps = 64 * static_cast<int>(sizeof(Element)) / kStepBytes;
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int panel = step / 4, in_panel = step % 4 * kStepBytes;
    const std::uint64_t a =
        ptx::descriptor(q + static_cast<std::uint32_t>((panel * kRows * kPanelBytes + in_panel) >> 4));
    const std::uint64_t b = ptx::descriptor(k + static_cast<std::uint32_t>((panel * 64 * kPanelBytes + in_panel) >> 4));
    if constexpr (sizeof(Element) == 4) {
      step == 0 ? ptx::wgmma_tf32_first(acc, a, b) : ptx::wgmma_tf32(acc, a, b);
    } else {
      constexpr DType kType = std::is_same_v<Element, __half> ? DType::f16 : DType::bf16;
      step == 0 ? ptx::wgmma_dense_first<kType>(acc, a, b) : ptx::wgmma_dense<kType>(acc, a, b);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin_accumulators(acc);
}

// Q of a CTA, 64 rows at a time. full: TMA's bytes have arrived; empty: every warp that multiplies is done.
template <typename Config>
struct QueryRing {
  char* stages;
  std::uint32_t full, empty;  // barriers, 8 bytes each
  int head, batch;

  __device__ __forceinline__ void init(int warps) const {
    for (std::uint32_t s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, warps);
    }
    ptx::mbarrier_init_fence();
  }

  __device__ __forceinline__ void load(const QkLaunch& launch, int row, int stage) const {
    const std::uint32_t barrier = full + 8 * static_cast<std::uint32_t>(stage);
    ptx::mbarrier_arrive_expect(barrier, Config::kStageBytes);
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel) {
      ptx::tma_load_4d(ptx::shared_address(stages + stage * Config::kStageBytes) +
                           static_cast<std::uint32_t>(panel * Config::kStageRows * kPanelBytes),
                       &launch.q, barrier, panel * (kPanelBytes * 64 / Config::kRowBytes), row, head, batch);
    }
  }
};

// Where a lane stores what it keeps of the 16 rows its warp has of a product.
template <typename Element, typename Config>
struct LaneStores {
  char* nonzeros;           // of row g
  std::uint32_t* metadata;  // word of rows g and g + 8
  std::uint32_t below;      // bytes from row g to row g + 8
  std::int64_t next_tile;   // words from a tile's metadata to the next tile's
  bool inside[Config::kTiles];

  __device__ __forceinline__ LaneStores(const QkPruneParams& p, const typename Config::Job& job, int row16) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    const std::int64_t row_bytes = p.scores.places / 2 * static_cast<int>(sizeof(Element));
    const std::int64_t place = static_cast<std::int64_t>(job.own_tile()) * Config::kTile + t * (Config::kTile / 4);
    nonzeros = static_cast<char*>(p.scores.nonzeros) + (job.matrix * p.scores.rows + row16 + g) * row_bytes +
               place / 2 * static_cast<int>(sizeof(Element));
    metadata = p.scores.metadata + job.matrix * p.scores.metadata_words +
               metadata_word(p.scores.rows, row16 / kRowUnit * kRowUnit, row16 / 16 % 2, g,
                             static_cast<std::int64_t>(job.own_tile()) * 4 + t);
    below = static_cast<std::uint32_t>(8 * row_bytes);
    next_tile = 2 * p.scores.rows;
    for (int i = 0; i < Config::kTiles; ++i) inside[i] = place + i * Config::kTile < p.scores.places;
  }

  __device__ __forceinline__ void store(int tile, const LaneResult& result) const {
    if (!inside[tile]) return;
    char* to = nonzeros + tile * (Config::kTile / 2 * static_cast<int>(sizeof(Element)));
    ptx::store_16(to, result.nonzeros[0]);
    ptx::store_16(to + below, result.nonzeros[1]);
    ptx::store_4(metadata + tile * next_tile, result.metadata);
  }

  // To the product 64 rows below, and to that of the next 64 places.
  __device__ __forceinline__ void move_down() {
    nonzeros += static_cast<std::uint64_t>(below) * 8;
    metadata += 64;
  }
  __device__ __forceinline__ void move_right() {
    nonzeros += Config::kPlaces / 2 * static_cast<int>(sizeof(Element));
    metadata += Config::kTiles * next_tile;
  }
};

// Prunes and stores what a warp has of a product; visible[i]: the visible_bits of tile i, of this thread's tile own +
// i.
template <typename Element, typename Config, QkMasks kMasks, int kGroupLog2, typename Stores>
__device__ __forceinline__ void prune_product(const QkPruneParams& p, int row16, int own, bool all_visible,
                                              const std::uint32_t (&visible)[Config::kTiles], float value_scale,
                                              const Stores& stores, const float (&acc)[32]) {
#pragma unroll
  for (int tile = 0; tile < Config::kTiles; ++tile) {
    float scores[Config::kTile / 8][4];
#pragma unroll
    for (int i = 0; i < Config::kTile / 2; ++i) scores[i / 4][i % 4] = acc[tile * (Config::kTile / 2) + i];
    stores.store(
        tile, prune_half<Element, typename Config::Job, kMasks>(
                  p, row16, own + tile, all_visible, [&] { return visible[tile]; }, kGroupLog2, value_scale, scores));
  }
}

// The visible_bits of this thread's tiles from `own` on. Called while no scores take registers.
template <typename Config, QkMasks kMasks>
__device__ __forceinline__ void find_visible(const QkPruneParams& p, int row16, int own,
                                             std::uint32_t (&visible)[Config::kTiles]) {
#pragma unroll 1
  for (int tile = 0; tile < Config::kTiles; ++tile) {
    const std::uint32_t bits = visible_bits<typename Config::Job, kMasks>(p, row16, own + tile);
    if (tile == 0) visible[0] = bits;
    visible[Config::kTiles - 1] = bits;
  }
}

template <typename Element, QkMasks kMasks, int kGroupLog2>
__global__ void __launch_bounds__(kGroupThreads* QkConfig<Element, kMasks>::kGroups,
                                  QkConfig<Element, kMasks>::kMinCtas)
    qk_prune_kernel(const __grid_constant__ QkLaunch launch) {
  using Config = QkConfig<Element, kMasks>;
  using Job = typename Config::Job;
  using Offset = KeyOffset<Config>;
  const QkPruneParams& p = launch.common;
  DSPATTN_ALIGNED_SHARED(char, shared, 1024);
  const Job job(p, blockIdx.x);
  if (job.first_tile >= job.end_tile) return;
  const RowRange rows = job_rows(p, job);
  if (rows.begin >= rows.end) return;
  char* sK = shared;
  char* sQ = shared + static_cast<int>(blockDim.x) / kGroupThreads * Config::kKeyBytes;
  const std::uint32_t barriers = ptx::shared_address(sQ + Config::kStages * Config::kStageBytes);
  const QueryRing<Config> ring{sQ, barriers, barriers + 8 * Config::kStages, job.head(p), job.batch(p)};
  load_keys<Element, Config::kChunks>(p, job, sK, Offset());
  ptx::cp_async_commit();
  if (threadIdx.x == 0) {
    ring.init((job.end_tile - job.first_tile + Config::kTiles - 1) / Config::kTiles * (kGroupThreads / 32));
    for (int s = 0; s < Config::kStages - 1 && rows.begin + s * Config::kStageRows < rows.end; ++s) {
      ring.load(launch, rows.begin + s * Config::kStageRows, s);
    }
  }
  ptx::cp_async_wait<0>();
  prepare_keys<Element, Config::kChunks>(p, job, sK, Offset());
  ptx::fence_async_proxy();
  __syncthreads();  // the barriers are set; the tensor core sees K
  if (job.own_tile() >= job.end_tile) return;

  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int warp_row = static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16;
  const std::uint32_t k_low =
      ptx::descriptor_low(ptx::shared_address(sK) + static_cast<std::uint32_t>(group * Config::kKeyBytes), 16);
  const std::uint32_t q_low = ptx::descriptor_low(ptx::shared_address(ring.stages), 16);
  LaneStores<Element, Config> stores(p, job, rows.begin + warp_row);
  const bool whole = job.keys(p, job.own_tile(Config::kTiles - 1)).end <= static_cast<int>(p.walk.n_k);
  const float value_scale = p.value_scale;
  int stage = 0, parity = 0;
  for (int row = rows.begin; row < rows.end; row += Config::kStageRows) {
    ptx::mbarrier_wait(ring.full + 8 * static_cast<std::uint32_t>(stage), parity);
    const bool visits = kMasks == QkMasks::none || !p.walk.skip_masked || visits_tile<Job>(p, row);
#pragma unroll 1
    for (int part = 0; part < Config::kStageRows; part += 64) {
      const int row16 = row + part + warp_row;
      const bool all_visible = sees_all<Job, kMasks>(p, row16 / kRowUnit * kRowUnit, whole, Config::kTiles);
      std::uint32_t visible[Config::kTiles];
      if (!all_visible) find_visible<Config, kMasks>(p, row16, 0, visible);
      float acc[32];
      if (visits) {
        multiply<Element, Config::kStageRows>(
            acc, q_low + static_cast<std::uint32_t>((stage * Config::kStageBytes + part * kPanelBytes) >> 4), k_low);
      }
      if (part + 64 == Config::kStageRows && threadIdx.x % 32 == 0) {
        ptx::mbarrier_arrive(ring.empty + 8 * static_cast<std::uint32_t>(stage));
      }
      // The stage before this one is filled: by now the other warpgroups have left it, or will soon.
      const int next = row + (Config::kStages - 1) * Config::kStageRows;
      if (part == 0 && threadIdx.x == 0 && next < rows.end) {
        const int last = stage == 0 ? Config::kStages - 1 : stage - 1;
        ptx::mbarrier_wait(ring.empty + 8 * static_cast<std::uint32_t>(last), stage == 0 ? parity ^ 1 : parity);
        ring.load(launch, next, last);
      }
      // Rows of the last stage may lie past the matrix; products are the warpgroup's, stores the warp's.
      if (visits && row16 < rows.end) {
        prune_product<Element, Config, kMasks, kGroupLog2>(p, row16, 0, all_visible, visible, value_scale, stores, acc);
      }
      stores.move_down();
    }
    if (++stage == Config::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

}  // namespace dspattn::cuda::pipeline::sm90
