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
#include "cuda/tile/key_row_masks.h"

namespace dspattn::cuda::sm90::backward {

// Hardware barriers of a CTA, by number.
enum class NamedBarrier : int {
  all = 0,      // __syncthreads
  queries = 1,  // the query warpgroup's 128 threads
  keys = 2,     // those of key warpgroup 0; the next is warpgroup 1's
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
  int ascends;         // 1: and it goes back from there (tile::GradientItems)
  int fresh;           // 1: its query tiles were not all written when the item before was taken
  tile::RowBand band;  // of the sequence
  tile::TileRange tiles;
  tile::TileRange inside;  // those that see all of the key block, as far as diagonal, window and length go
};

// What the key warpgroups need to know of a query tile in work.
struct TileFacts {
  int head;                 // of the problem
  int first;                // row of the sequence that it begins with
  int all_inside;           // 1: each of its rows sees the whole key block, as far as diagonal, window and length go
  int mask_tile;            // of the mask's words
  int masked[kMarkCopies];  // 1: some row may not see some key, for whatever reason
};

// A step of an item's walk: the query tiles, for one head that shares the key head after the other.
struct Step {
  int head;  // of the problem
  int tile;  // of the sequence

  __device__ __forceinline__ static Step first(const BackwardParams& params, const Item& item) {
    return {item.kv_head * params.work.heads_per_kv_head.value, item.walk};
  }
  __device__ __forceinline__ void advance(const Item& item) {
    if (item.ascends != 0) {
      if (--tile < item.tiles.begin) tile = item.tiles.end - 1;
    } else {
      if (++tile == item.tiles.end) tile = item.tiles.begin;
    }
    if (tile == item.walk) ++head;
  }
  __device__ __forceinline__ int scratch_tile(const BackwardParams& params, const Item& item) const {
    return head * params.query_tiles + item.first_tile + tile;  // in the workspace
  }
};

// What the warpgroup with the scores tells the other (Split::products): each of its threads the packed scores of a
// tile. Every thread arrives for itself: racecheck follows no leader's arrival for what its warp stored.
template <typename C>
struct HandedScores {
  std::uint32_t words[2][C::kTileQ / 16][128][4];
  std::uint64_t full[2], empty[2];

  __device__ __forceinline__ void init_barriers() {
    for (std::uint64_t& barrier : full) ptx::mbarrier_init(ptx::shared_address(&barrier), 128);
    for (std::uint64_t& barrier : empty) ptx::mbarrier_init(ptx::shared_address(&barrier), 128);
  }
};
struct NothingHanded {
  __device__ __forceinline__ void init_barriers() {}
};

template <typename C>
struct alignas(1024) Shared {
  static constexpr int kSlots = C::kDScoreSlots;
  std::uint8_t q[C::kStages][C::kTileQBytes];
  std::uint8_t d_out[C::kStages][C::kTileQBytes];
  std::uint8_t k[C::kKeySlots][C::kTileKBytes];
  std::uint8_t v[C::kValueSlots][C::kTileKBytes];
  std::uint8_t d_scores[kSlots][C::kDScoreBytes];  // rows are keys in the order of K's rows, columns queries
  alignas(16) TileNumbers<C::kTileQ, C::kCopiesOfD> numbers[C::kStages];
  alignas(16) std::conditional_t<C::kSplit == Split::products, HandedScores<C>, NothingHanded> handed;
  TileFacts facts[C::kStages];
  std::uint64_t full[C::kStages], empty[C::kStages];  // of q, d_out, numbers and facts
  // Of d_scores: all is there; dQ is computed, which where biases come ahead nobody asks.
  std::uint64_t stored[kSlots], free[C::kBiasAhead ? 1 : kSlots];
  std::uint64_t biased[C::kBiasAhead ? kSlots : 1];  // of d_scores: a bias is there, which dS will replace
  // Of items; a CTA's item number m has number m % 2.
  std::uint64_t described[2];    // items[] says what it is, and its K and V are there
  std::uint64_t keys_free[2];    // nobody needs its K and V any more
  std::uint64_t values_free[2];  // nobody needs its V any more
  std::uint64_t left[2];         // the key warpgroups do not need items[] any more
  Item items[2];
  std::int32_t all_prepared;  // 1: all query tiles are written, as this CTA has seen; thread 0 alone uses it

  // For one thread, before anybody waits. Arrivals are those of warps, but of a bias those of threads.
  __device__ __forceinline__ void init_barriers() {
    const auto init = [](std::uint64_t& barrier, int arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    };
    for (std::uint64_t& barrier : full) init(barrier, 1);
    for (std::uint64_t& barrier : empty) init(barrier, 4 * C::kConsumers);
    for (std::uint64_t& barrier : stored) init(barrier, 4 * C::kParts);
    for (std::uint64_t& barrier : free) init(barrier, 4);
    for (std::uint64_t& barrier : biased) init(barrier, 32 * C::kParts);
    handed.init_barriers();
    for (std::uint64_t& barrier : described) init(barrier, 4);
    for (std::uint64_t& barrier : keys_free) init(barrier, 4 * (C::kConsumers + 1));
    for (std::uint64_t& barrier : values_free) init(barrier, C::kSplit == Split::keys ? 4 * C::kConsumers : 4);
    for (std::uint64_t& barrier : left) init(barrier, 4 * C::kConsumers);
    ptx::mbarrier_init_fence();
  }
};

template <typename C>
inline constexpr int kSharedBytes = static_cast<int>(sizeof(Shared<C>)) + 1024;  // the runtime aligns to 16 bytes only

// Number of steps of the item.
__device__ __forceinline__ int steps_of(const BackwardParams& params, const Item& item) {
  return item.tiles.count() * params.work.heads_per_kv_head.value;
}

template <typename C>
__device__ __forceinline__ TileFacts facts_of(const BackwardParams& params, const Item& item, const Step& step) {
  const bool inside = step.tile >= item.inside.begin && step.tile < item.inside.end;
  const bool masked = !inside || params.allowed.data != nullptr || (!C::kBiasAhead && params.bias.data != nullptr);
  const int words = params.mask_words.block(item.sequence, step.head, step.tile,
                                            item.block - params.first_key_tile / C::kPartsPerBlock);
  TileFacts facts = {step.head, step.tile * C::kTileQ, inside ? 1 : 0,
                     words * tile::kMaskTilesOfBlock + item.part * C::kParts};
  for (int& copy : facts.masked) copy = masked ? 1 : 0;
  return facts;
}

// Of the step's share of dQ.
template <typename C>
__device__ __forceinline__ tile::Turn turn_of(const BackwardParams& params, const Item& item, const Step& step) {
  const int first = step.tile * C::kTileQ;
  const tile::KeyBlockRange seen = tile::key_blocks_of(item.band, first, min(first + C::kTileQ, item.rows) - 1);
  if (item.ascends != 0) return tile::ascending_turn_of(seen, item.block, item.part, C::kPartsPerBlock);
  return tile::turn_of(seen, step.tile, C::kTileQ, item.block, item.part, C::kPartsPerBlock, params.wraps != 0);
}

}  // namespace dspattn::cuda::sm90::backward
