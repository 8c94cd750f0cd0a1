// Shared memory of the fused backward: tiles, weights, barriers, the item in work.
#pragma once

#include <cstdint>

#include "cuda/blocks/barriers.h"
#include "cuda/blocks/work.h"
#include "cuda/ptx/barrier.h"
#include "cuda/sm90/backward/config.h"
#include "cuda/sm90/backward/params.h"
#include "cuda/tile/gradient_walk.h"

namespace dspattn::cuda::sm90::backward {

// Hardware barriers of a CTA, by number.
enum class NamedBarrier : int {
  item = 0,            // all threads: an item is described, or done with
  producer = 1,        // the producer's 128 threads
  weights_free = 2,    // consumers: nobody reads the last tile's weights and dS any more
  weights_stored = 3,  // consumers: this tile's are there
  shares_added = 4,    // + warpgroup: its share of dQ is added; its threads and the warp that counts it
};
DSPATTN_HOST_DEVICE constexpr int barrier_number(NamedBarrier barrier, int index = 0) {
  return static_cast<int>(barrier) + index;
}

// A key tile of one (sequence, key head), and the query tiles that see it.
struct Item {
  int valid;  // 0: there are no more
  int sequence, batch, kv_head;
  int rows;            // query rows of the sequence
  int keys;            // of the sequence, whether visible or not
  int k_row;           // row of K and V that holds the sequence's key 0
  int block, part;     // key block, and which key tile of it
  int first_tile;      // the sequence's first query tile in the workspace
  int walk;            // query tile that the walk begins with
  tile::RowBand band;  // of the sequence
  tile::TileRange tiles;
};

template <typename C>
struct alignas(1024) Shared {
  std::uint8_t q[C::kStages][C::kTileQBytes];
  std::uint8_t d_out[C::kStages][C::kTileQBytes];
  std::uint8_t k[C::kTileKBytes];
  std::uint8_t v[C::kTileKBytes];
  std::uint8_t weights[C::kWeightBytes];  // rows are queries, columns keys in the order of K's rows
  std::uint8_t d_scores[C::kWeightBytes];
  alignas(16) RowNumbers rows[C::kStages][C::kTileQ];
  std::uint64_t full[C::kStages], empty[C::kStages];  // of q, d_out and rows; every consumer warp is done with them
  std::uint64_t may_add[C::kConsumers];               // a warpgroup's share of dQ is next
  Item item;

  // For one thread, before anybody waits.
  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&empty[i]), 4 * C::kConsumers);
    }
    for (std::uint64_t& barrier : may_add) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    ptx::mbarrier_init_fence();
  }
};

template <typename C>
inline constexpr int kSharedBytes = static_cast<int>(sizeof(Shared<C>)) + 1024;  // the runtime aligns to 16 bytes only

// What a thread needs of a step: which head, which query tile.
struct Step {
  int head;          // of the problem
  int tile;          // of the sequence
  int scratch_tile;  // in the workspace
};

// Number of steps of the item, and one of them.
__device__ __forceinline__ int steps_of(const BackwardParams& params, const Item& item) {
  return item.tiles.count() * params.work.heads_per_kv_head.value;
}
__device__ __forceinline__ Step step_of(const BackwardParams& params, const Item& item, int index) {
  const int count = item.tiles.count();
  const int in_group = index / count;
  Step step;
  step.head = item.kv_head * params.work.heads_per_kv_head.value + in_group;
  step.tile = tile::tile_of_step(item.tiles, item.walk, index - in_group * count);
  step.scratch_tile = step.head * params.query_tiles + item.first_tile + step.tile;
  return step;
}

// Of the step's share of dQ.
template <typename C>
__device__ __forceinline__ tile::Turn turn_of(const BackwardParams& params, const Item& item, const Step& step) {
  const int first = step.tile * C::kTileQ;
  const tile::KeyBlockRange seen = tile::key_blocks_of(item.band, first, min(first + C::kTileQ, item.rows) - 1);
  return tile::turn_of(seen, step.tile, C::kTileQ, item.block, item.part, C::kPartsPerBlock, params.wraps != 0);
}

}  // namespace dspattn::cuda::sm90::backward
