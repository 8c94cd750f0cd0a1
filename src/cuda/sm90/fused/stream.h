// The producer of the fused kernel where the copy engine brings everything: whole blocks of keys, no mask tensors.
//
// Warps walk the items, and one lane of each asks the engine for what that warp brings. Whole warps, because the
// compiler then knows that one lane asks and that all values are the same in a warp: a request takes a third of the
// instructions it takes a thread alone, and the consumers wait for requests (docs/fused_kernel.md).
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused/work.h"

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

// What a warp may bring.
enum Kind : int { kKeys, kValues, kQueries };

// Walks the items and brings what is of kinds `first` to `last`: keys, values, both, or queries with the items'
// descriptions. Kinds with warps of their own need not wait until one another's places are free; they run through the
// same code, because code must be fetched.
template <typename C>
__device__ __forceinline__ void stream(const FusedParams& params, Shared<C>& shared, Kind first, Kind last) {
  const bool pairs = C::kFull || (C::kPairs && params.pairs != 0);
  const int stages = stages_of<C>(params);
  const Addresses<C> address(shared);
  auto rank = static_cast<std::uint32_t>(pair_rank(1));
  ptx::pin(rank);
  Ring<C::kStages> ring;
  int number = 0;  // of the block's items so far, modulo 4
#pragma unroll 1
  for (int turn = 0; turn < params.order.turns; ++turn) {
    Work work;
    if (!describe_item<C>(params, turn, work)) continue;
    if (first == kQueries) {
      await_description<C>(shared, number);
      if (ptx::elect()) load_q_by_engine<C>(params, shared, work, number);
      __syncwarp();
      number = (number + 1) & 3;
      continue;
    }
    const int kv_head = params.heads_per_kv_head.quotient(work.head);
    const int tiles = (work.blocks.end - work.blocks.begin) * C::kTilesPerBlock;
    const int begin = work.k_row + first_block<C>(params, work) * tile::kBlockKeys;
    const int step = block_step<C>(params);
    // All thread blocks begin at once, and what they ask for takes microseconds to come: V, which is needed last, is
    // asked for when the consumers have taken the first Q. They come to no second one without this V.
    if (C::kPairs && !C::kFull && turn == 0 && first == kValues && tiles > 0) {
      ptx::mbarrier_wait(address(shared.q_empty), 0);
    }
#pragma unroll 1
    for (int i = -C::kQEntries; i < tiles; ++i) {
      const int row = begin + i / C::kTilesPerBlock * step + i % C::kTilesPerBlock * params.keys.part_step;
      const auto stage = static_cast<std::uint32_t>(ring.stage);
#pragma unroll 1
      for (int kind = first; kind <= last; ++kind) {
        const bool keys = kind == kKeys;
        const std::uint32_t place = (keys ? address(shared.k) : address(shared.v)) + stage * C::kTileKBytes;
        const std::uint32_t full = (keys ? address(shared.k_full) : address(shared.v_full)) + 8 * stage;
        ptx::mbarrier_wait((keys ? address(shared.k_empty) : address(shared.v_empty)) + 8 * stage, ring.parity ^ 1);
        if (pairs) {  // what is to be filled is free in the other block, too
          const std::uint32_t peer = (keys ? address(shared.k_peer_empty) : address(shared.v_peer_empty)) + 8 * stage;
          if (ptx::elect()) ptx::mbarrier_arrive_at(peer, rank ^ 1);
          ptx::mbarrier_wait(peer, ring.parity);
        }
        if (ptx::elect()) {
          if (C::kQEntries > 0 && i < 0) {
            load_q_entry<C>(params, work.q_row + work.row_begin, work.head, work.batch, place, full, keys);
          } else if (pairs) {
            load_half_for_both<C>(params, place, full, keys, row, kv_head, work.batch, static_cast<int>(rank));
          } else {
            load_tile_by_engine<C>(params, place, full, keys, row, kv_head, work.batch);
          }
        }
        __syncwarp();
      }
      ring.advance(stages);
    }
  }
  if constexpr (!C::kFull) {
    if (first == kQueries && ptx::elect()) announce_end<C>(shared, number);
    __syncwarp();
  }
}

}  // namespace dspattn::cuda::sm90
