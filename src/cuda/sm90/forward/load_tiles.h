// The producer's warps that load K and V tiles by TMA.
//
// Where all key blocks are whole they walk the items themselves (load_walked_items); where sequences may end within a
// block they learn of items from the warp that loads Q (load_described_items). One lane of a warp asks TMA. Whole
// warps, because the compiler then knows that one lane asks and that all values are the same in a warp: a request takes
// a third of the instructions it takes a thread alone, and the consumers wait for requests (docs/log/forward.md).
//
// CTAs in pairs share K and V: each loads one of the two panels for both. Of a last key block that is not whole each
// completes its own copy (complete_tails.h).
#pragma once

#include <cstdint>

#include "cuda/blocks/tma_tiles.h"
#include "cuda/ptx/barrier.h"
#include "cuda/sm90/forward/load_q.h"
#include "cuda/sm90/forward/roles.h"
#include "cuda/sm90/forward/shared.h"

namespace dspattn::cuda::sm90 {

// Addresses of what is in shared memory. Where it begins is read from a special register, which takes long: once.
template <typename C>
struct Addresses {
  const Shared<C>& shared;
  std::uint32_t base;

  __device__ __forceinline__ explicit Addresses(const Shared<C>& s) : shared(s), base(ptx::shared_address(&s)) {
    ptx::pin(base);
  }
  template <typename T>
  __device__ __forceinline__ std::uint32_t operator()(const T& member) const {
    return base + static_cast<std::uint32_t>(reinterpret_cast<const std::uint8_t*>(&member) -
                                             reinterpret_cast<const std::uint8_t*>(&shared));
  }
};

// What of an item its tiles' loads need.
struct TileRun {
  int tiles;
  int first_row;  // of K and V: the first key of the block that is loaded first
  int batch, head;
  int q_row;    // of Q, where part of it goes through the ring
  bool common;  // pairs: K and V are the same for both CTAs
  Tail tail;    // of the item's last key block
};

template <typename C>
struct TileLoader {
  enum Kind : int { kKeys, kValues };

  const ForwardParams& params;
  const Addresses<C> address;
  Kind first, last;  // what this warp loads: keys, values, or both
  bool pairs;
  int stages;
  std::uint32_t rank;  // in the pair
  Ring<C::kStages> ring;

  __device__ __forceinline__ TileLoader(const ForwardParams& p, Shared<C>& s, Role role, bool in_pairs)
      : params(p),
        address(s),
        first(role == Role::load_v ? kValues : kKeys),
        last(role == Role::load_k ? kKeys : kValues),
        pairs(in_pairs),
        stages(stages_of<C>(p)),
        rank(static_cast<std::uint32_t>(pair_rank(1))) {
    ptx::pin(rank);
  }

  // An item's first entry of the ring, where part of its Q goes that way: in K's stage, beside nothing in V's. Every
  // item has it, also one without keys.
  __device__ __forceinline__ void load_q_entry(const TileRun& run, bool keys, std::uint32_t to, std::uint32_t full) {
    if (keys) {
      tma_load_q_panels<C>(params.q_map, run.q_row, run.head, run.batch, to, full, 0, C::kQPanelsByRing);
    } else {
      ptx::mbarrier_arrive(full);
    }
  }

  // All of an item's tiles. kMayEnd: its last key block may be partial.
  template <bool kMayEnd>
  __device__ __forceinline__ void load(const TileRun& run) {
    const Shared<C>& shared = address.shared;
    const KeyTileMaps maps{params.k_map, params.v_map, params.keys.half_step};
    const int kv_head = params.work.heads_per_kv_head.quotient(run.head);
    const int step = block_step<C>(params.work);
#pragma unroll 1
    for (int i = -C::kQEntries; i < run.tiles; ++i) {
      const bool in_tail =
          kMayEnd && i >= 0 && (descends<C>(params.work) ? i < C::kTilesPerBlock : i >= run.tiles - C::kTilesPerBlock);
      const Tail tail = in_tail ? run.tail : Tail::none;
      const int row = run.first_row + i / C::kTilesPerBlock * step + i % C::kTilesPerBlock * params.keys.part_step;
      const auto stage = static_cast<std::uint32_t>(ring.stage);
#pragma unroll 1
      for (int kind = first; kind <= last; ++kind) {
        const bool keys = kind == kKeys;
        const std::uint32_t to = (keys ? address(shared.k) : address(shared.v)) + stage * C::kTileKBytes;
        const std::uint32_t full = (keys                 ? address(shared.k_full)
                                    : tail == Tail::none ? address(shared.v_full)
                                                         : address(shared.tail_begun)) +
                                   8 * stage;
        ptx::mbarrier_wait((keys ? address(shared.k_empty) : address(shared.v_empty)) + 8 * stage, ring.parity ^ 1);
        if (pairs) {  // what is to be filled is free in the other CTA, too
          const std::uint32_t peer = (keys ? address(shared.k_peer_empty) : address(shared.v_peer_empty)) + 8 * stage;
          if (ptx::elect()) ptx::mbarrier_arrive_at(peer, rank ^ 1);
          ptx::mbarrier_wait(peer, ring.parity);
        }
        if (ptx::elect()) {
          if (C::kQEntries > 0 && i < 0) {
            load_q_entry(run, keys, to, full);
          } else if (tail != Tail::by_threads && run.common) {
            tma_load_half_for_both<C>(maps, to, full, keys, row, kv_head, run.batch, static_cast<int>(rank));
          } else if (tail != Tail::by_threads) {
            tma_load_tile<C>(maps, to, full, keys, row, kv_head, run.batch);
          } else if (!keys) {
            ptx::mbarrier_arrive(full);  // the consumers have left the stage's V, and its K before that
          }
        }
        __syncwarp();
      }
      ring.advance(stages);
    }
  }
};

// Whole key blocks: the warp walks the items. With Role::load_q it loads their Q and describes them; by the same code,
// because code must be fetched.
template <typename C>
__device__ __forceinline__ void load_walked_items(const ForwardParams& params, Shared<C>& shared, Role role) {
  const bool pairs = C::kFull || (C::kPairs && params.work.pairs != 0);
  TileLoader<C> loader(params, shared, role, pairs);
  int number = 0;  // of the CTA's items so far, modulo 4
#pragma unroll 1
  for (int round = 0; round < params.work.order.rounds; ++round) {
    Work work;
    if (!describe_item<C, false>(params.work, round, work)) continue;
    if (role == Role::load_q) {
      await_description<C>(shared, number);
      if (ptx::elect()) load_q_and_describe<C>(params, shared, work, number);
      __syncwarp();
      load_means<C>(params, shared, work, number);
      number = (number + 1) & 3;
      continue;
    }
    const int tiles = (work.blocks.end - work.blocks.begin) * C::kTilesPerBlock;
    // All CTAs begin at once, and what they ask for takes microseconds to arrive: V, which is needed last, is asked for
    // when the consumers have taken the first Q. They get to no second one without this V.
    if (C::kPairs && !C::kFull && round == 0 && role == Role::load_v && tiles > 0) {
      ptx::mbarrier_wait(loader.address(shared.q_empty), 0);
    }
    loader.template load<false>({.tiles = tiles,
                                 .first_row = work.k_row + first_block<C>(params.work, work) * tile::kBlockKeys,
                                 .batch = work.batch,
                                 .head = work.head,
                                 .q_row = work.q_row + work.row_begin,
                                 .common = pairs,
                                 .tail = Tail::none});
  }
  if constexpr (!C::kFull) {
    if (role == Role::load_q && ptx::elect()) announce_end<C>(shared, number);
    __syncwarp();
  }
}

// Sequences may end within a key block: items are those that the warp with Role::load_q describes.
template <typename C>
__device__ __forceinline__ void load_described_items(const ForwardParams& params, Shared<C>& shared, Role role) {
  const bool pairs = C::kPairs && params.work.pairs != 0;
  TileLoader<C> loader(params, shared, role, pairs);
#pragma unroll 1
  for (int number = 0;; number = (number + 1) & 3) {
    const int buffer = number % C::kQBuffers;
    ptx::mbarrier_wait(loader.address(shared.described[buffer]), number / C::kQBuffers & 1);
    const Item<C::kConsumers>& item = shared.items[number % kItemSlots];
    const bool valid = uniform(item.valid) != 0;
    const TileRun run{.tiles = uniform(item.entries) - C::kQEntries,
                      .first_row = uniform(item.k_row + item.first_block * tile::kBlockKeys),
                      .batch = uniform(item.batch),
                      .head = uniform(item.head),
                      .q_row = C::kQEntries > 0 ? uniform(item.out_row) : 0,  // the output's rows are those of Q
                      .common = pairs && uniform(item.common) != 0,
                      .tail = static_cast<Tail>(uniform(static_cast<int>(item.tail)))};
    if (!valid) return;
    if (ptx::elect()) ptx::mbarrier_arrive(loader.address(shared.q_empty[buffer]));  // every lane has read it
    __syncwarp();
    loader.template load<true>(run);
  }
}

}  // namespace dspattn::cuda::sm90
