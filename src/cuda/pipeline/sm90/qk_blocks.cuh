// qk_prune on Hopper under a block mask: each block row of 64 or 128 rows has keys of its own, so Q stays and K
// streams.
//
// A CTA is a warpgroup. It has a block row and up to kShare slots' worth of 64 places; K passes through a ring of
// cp.async stages, 64 places each, in the layout of qk_prune.cuh, and so do the products and what follows them. The
// power of two that bf16 scores are compared at is multiplied into Q.
//
// Requires what cuda/pipeline/sm80/qk_prune.cuh requires, no mask but the blocks, and sm_90a.
#pragma once

#include "cuda/pipeline/sm90/qk_prune.cuh"

namespace dspattn::cuda::pipeline::sm90 {

template <typename Type>
struct QkBlocksConfig {
  using Element = Type;
  using Common = QkConfig<Element, QkMasks::none>;
  static constexpr int kPlaces = Common::kPlaces, kTile = Common::kTile, kTiles = Common::kTiles;
  static constexpr int kChunks = Common::kChunks, kKeyBytes = Common::kKeyBytes;
  static constexpr int kProductBytes = 64 * Common::kRowBytes;  // of Q
  static constexpr int kShare = 8;                              // times 64 places
  static constexpr int kStages = 2;
  static constexpr int kMinCtas = Common::kFp32 ? 4 : 6;
  using Job = QkJob<kTile, kGroupThreads, kTiles * kShare>;

  static constexpr int shared_bytes(int block) { return block / 64 * kProductBytes + kStages * kKeyBytes; }
};

template <typename Element>
struct RowOffset {
  __device__ __forceinline__ int operator()(int row, int chunk) const { return panel_offset(64, row, chunk); }
};

template <typename Element, int kGroupLog2>
__global__ void __launch_bounds__(kGroupThreads, QkBlocksConfig<Element>::kMinCtas)
    qk_blocks_kernel(const __grid_constant__ QkPruneParams p) {
  using Config = QkBlocksConfig<Element>;
  using Job = typename Config::Job;
  using Offset = KeyOffset<typename Config::Common>;
  DSPATTN_ALIGNED_SHARED(char, shared, 1024);
  const Job job(p, blockIdx.x);
  if (job.first_tile >= job.end_tile) return;
  const int row0 = job.row_begin(p), rows = min(p.walk.block, static_cast<int>(p.scores.rows) - row0);
  char* sQ = shared;
  char* sK = shared + p.walk.block / 64 * Config::kProductBytes;
  const Element* gK = matrix_of<Element>(p.k, job.batch(p), job.head(p) / p.heads_per_kv);
  // Which blocks the CTA's slots are, one a lane: nothing waits for the mask tile by tile.
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_slot = p.walk.slot_of_tile<Config::kTile>(job.first_tile);
  const int end_slot = p.walk.slot_of_tile<Config::kTile>(job.end_tile - 1) + 1;
  static_assert(Config::kShare <= 32);
  const int lane_block =
      first_slot + lane < end_slot ? p.walk.key_block(job.row_block(p), first_slot + lane) * p.walk.block : 0;
  const auto block_key = [&](int tile) {
    return __shfl_sync(~0u, lane_block, p.walk.slot_of_tile<Config::kTile>(tile) - first_slot);
  };
  const auto load = [&](int tile, int stage) {
    if (tile < job.end_tile) {
      const int key = block_key(tile);  // a block has 64 places or more: one for all of a stage
#pragma unroll
      for (int i = 0; i < Config::kTiles; ++i) {
        load_key_tile<Element, Config::kChunks, Config::kTile>(
            p, gK, key, p.walk.place_in_block<Config::kTile>(tile + i),
            sK + stage * Config::kKeyBytes + Offset::tile(i), Offset());
      }
    }
    ptx::cp_async_commit();
  };

  for (int row = 0; row < rows; row += 64) {
    load_queries<Element, Config::kChunks>(p, matrix_of<Element>(p.q, job.batch(p), job.head(p)), row0 + row, 64,
                                           sQ + row / 64 * Config::kProductBytes, RowOffset<Element>());
  }
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) load(job.first_tile + s * Config::kTiles, s);
  ptx::cp_async_wait<Config::kStages - 2>();
  for (int row = 0; row < rows; row += 64) {
    char* const at = sQ + row / 64 * Config::kProductBytes;
    if constexpr (sizeof(Element) == 4) round_rows_tf32<Config::kChunks>(at, 64, RowOffset<Element>());
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      scale_rows_bf16<Config::kChunks>(at, 64, p.key_scale, RowOffset<Element>());
    }
  }

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const std::uint32_t q_low = ptx::descriptor_low(ptx::shared_address(sQ), 16);
  const std::uint32_t k_low = ptx::descriptor_low(ptx::shared_address(sK), 16);
  LaneStores<Element, Config> stores(p, job, row0 + warp_row);
  const float value_scale = p.value_scale;
  int stage = 0;
  for (int tile = job.first_tile; tile < job.end_tile; tile += Config::kTiles) {
    ptx::cp_async_wait<Config::kStages - 2>();
    if constexpr (sizeof(Element) == 4) {
      round_rows_tf32<Config::kChunks>(sK + stage * Config::kKeyBytes, Config::kPlaces, RowOffset<Element>());
    }
    ptx::fence_async_proxy();
    __syncthreads();  // the tensor core sees this tile (and Q); all have left the stage that is loaded next
    load(tile + (Config::kStages - 1) * Config::kTiles, stage == 0 ? Config::kStages - 1 : stage - 1);
    const bool whole = block_key(tile) + p.walk.block <= static_cast<int>(p.walk.n_k);
    LaneStores<Element, Config> down = stores;
#pragma unroll 1
    for (int row = 0; row < rows; row += 64) {
      const int row16 = row0 + row + warp_row, own = tile - job.first_tile;
      const bool all_visible = sees_all<Job, QkMasks::none>(p, row16 / kRowUnit * kRowUnit, whole);
      std::uint32_t visible[Config::kTiles];
      if (!all_visible) find_visible<Config, QkMasks::none>(p, row16, own, visible);
      float acc[32];
      multiply<Element, 64>(acc, q_low + static_cast<std::uint32_t>(row / 64 * (Config::kProductBytes >> 4)),
                            k_low + static_cast<std::uint32_t>(stage * (Config::kKeyBytes >> 4)));
      if (row + warp_row < rows) {
        prune_product<Element, Config, QkMasks::none, kGroupLog2>(p, row16, own, all_visible, visible, value_scale,
                                                                  down, acc);
      }
      down.move_down();
    }
    stores.move_right();
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  ptx::cp_async_wait<0>();
}

}  // namespace dspattn::cuda::pipeline::sm90
