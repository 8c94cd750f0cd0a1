// Shared memory of the fused backward: tiles, dS, barriers, the item in work.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/blocks/barriers.h"
#include "cuda/blocks/work.h"
#include "cuda/ptx/barrier.h"
#include "cuda/sm90/backward/config.h"
#include "cuda/sm90/backward/params.h"
#include "cuda/tile/gradient_walk.h"

namespace dspattn::cuda::sm90::backward {

// Hardware barriers of a CTA, by number.
enum class NamedBarrier : int {
  item = 0,     // all threads: an item is described, or done with
  queries = 1,  // the query warpgroup's 128 threads
};
DSPATTN_HOST_DEVICE constexpr int barrier_number(NamedBarrier barrier) { return static_cast<int>(barrier); }

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

// What the warpgroup with the scores tells the other (Split::products): each of its threads the packed scores of a tile.
template <typename C>
struct HandedScores {
  std::uint32_t words[2][C::kTileQ / 16][128][4];
};
struct NothingHanded {};

template <typename C>
struct alignas(1024) Shared {
  static constexpr int kSlots = C::kDScoreSlots;
  std::uint8_t q[C::kStages][C::kTileQBytes];
  std::uint8_t d_out[C::kStages][C::kTileQBytes];
  std::uint8_t k[C::kTileKBytes];
  std::uint8_t v[C::kTileKBytes];
  std::uint8_t d_scores[kSlots][C::kDScoreBytes];  // rows are keys in the order of K's rows, columns queries
  alignas(16) TileNumbers<C::kTileQ> numbers[C::kStages];
  alignas(16) std::conditional_t<C::kSplit == Split::products, HandedScores<C>, NothingHanded> handed;
  std::uint64_t full[C::kStages], empty[C::kStages];         // of q, d_out and numbers
  std::uint64_t stored[kSlots], free[kSlots];                // of d_scores: all is there; dQ is computed
  std::uint64_t handed_full[2], handed_empty[2];             // of handed (Split::products)
  Item item;

  // For one thread, before anybody waits. Arrivals are those of warps.
  __device__ __forceinline__ void init_barriers() {
    const auto init = [](std::uint64_t& barrier, int arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    };
    for (std::uint64_t& barrier : full) init(barrier, 1);
    for (std::uint64_t& barrier : empty) init(barrier, 4 * C::kConsumers);
    for (std::uint64_t& barrier : stored) init(barrier, 4 * C::kParts);
    for (std::uint64_t& barrier : free) init(barrier, 4);
    for (std::uint64_t& barrier : handed_full) init(barrier, 4);
    for (std::uint64_t& barrier : handed_empty) init(barrier, 4);
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
