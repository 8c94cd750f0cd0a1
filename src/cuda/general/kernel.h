// Attention with scores pruned to N:M, one kernel for every card since Ampere and every pattern: scores on tensor cores
// (mma.sync), selection in registers, exponentials of what is kept, values on sparse tensor cores (mma.sp) where the
// hardware has the pattern and on dense ones with zeros elsewhere. Nothing of size n_q x n_k touches memory.
//
// A CTA takes kTileQ query rows of one (sequence, head); a warp owns 16 or 32 of them. K and V come by cp.async, one
// tile ahead (two stages), or where shared memory is short V beside the scores and the next K beside the output (one).
// See docs/general_kernel.md.
#pragma once

#include <cstdint>

#include "cuda/general/item.h"
#include "cuda/general/loader.h"
#include "cuda/general/params.h"
#include "cuda/general/products.h"
#include "cuda/general/results.h"
#include "cuda/general/weigh_warp.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::general {

// The walk over an item's keys, one tile after the other.
template <typename C>
__device__ __forceinline__ void walk(const ForwardParams& params, ItemOf<C>& item, Loader<C>& loader,
                                     Products<C>& products) {
  const tile::TileRange& tiles = item.tiles;
  const tile::TileRange& interior = item.interior;  // no row misses a key
  // 1: K and V come a tile ahead. 0: V beside the scores, K beside the output.
  const int ahead = C::kKeepsAddresses ? 1 : params.stages >> 1;
  loader.begin(ahead);
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    int bare = 0, kept_stage = 0;
    if constexpr (C::kKeepsAddresses) {  // asked for before the wait
      kept_stage = loader.stage_of(tile, 1);
      bare = ptx::opaque(params.bare_scores != 0 && tile >= interior.begin && tile < interior.end ? 1 : 0);
    }
    const bool last = tile + 1 == tiles.end;
    const auto ask_for_k = [&] {  // one stage
      if (ahead == 0 && !loader.takes_turns()) loader.load_after(tile, 0, false);
    };
    const auto stage = [&] { return C::kKeepsAddresses ? kept_stage : loader.stage_of(tile, ahead); };
    loader.await_stage(tile, stage(), ahead);
    if (!C::kKeepsAddresses && ahead != 0) loader.load_ahead(tile, stage() ^ 1);
#pragma unroll 1
    for (int pass = C::kAll ? params.extras.choosing_passes : 0; pass >= 0; --pass) {
      if constexpr (C::kAll) {
        if (const int parts = item.group.parts(); parts > 1) loader.load_part(pass > 0 ? parts - pass : item.own_part);
      }
      const std::uint32_t k = loader.k_tile(stage());
      products.compute_scores(k);
      const bool waits = ahead == 0 && pass == 0;
      if (C::kSharesOutput && loader.takes_turns()) __syncthreads();  // all have left K: there they exchange
      if (!C::kSharesOutput && waits) loader.wait_for_v(tile);
      if (C::kKeepsAddresses && ahead != 0) loader.load_ahead(tile, stage() ^ 1);  // beside the products
      if (C::kAsksEarly) ask_for_k();
      weigh_warp<C>({params, item, tile, bare, pass}, products, [&](int part) { products.compute_scores(k, part); });
      if constexpr (C::kSharesOutput) {  // V is waited for last: until then warps need not keep step
        products.exchange_weights(loader.exchange_place());
        if (waits) loader.wait_for_v(tile);
      }
    }
    if (!C::kAsksEarly) ask_for_k();
    if (!C::kAll || params.out.data != nullptr) products.add_output(loader.v_tile(stage()));
    if (loader.takes_turns() && !last) {
      __syncthreads();  // all have left V
      loader.load_k(item, tile + 1, 0);
    }
  }
  if constexpr (C::kTakesItems) {
    if (loader.next_item().asked != 0) loader.load_q(loader.next_item());
  }
  if constexpr (C::kSharesOutput) {
    __syncthreads();  // all have left V, and what was exchanged before
    products.exchange_states(loader.exchange_place());
  }
}

// All of an item.
template <typename C>
__device__ __forceinline__ void serve(const ForwardParams& params, ItemOf<C>& item, Loader<C>& loader,
                                      Products<C>& products) {
  products.clear();
  if (params.pages.table != nullptr && sees_keys(item)) look_for_pages<C>(params, item);
  if constexpr (C::kAll) {
    if (params.extras.means.data != nullptr) clear_rest<C>(item);
  }
  if (sees_keys(item)) walk<C>(params, item, loader, products);
#pragma unroll
  for (int i = 0; i < C::kOutBlocks; ++i) {
    const int row = C::kSharesOutput ? own_row<C>() ^ 16 * i : own_row<C>() + 16 * i;
    store_block<C>(params, item, row, products.rows[i], i, products.first_column());
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kMostThreads, C::kCtas* C::kWarps / C::kMostWarps)
    general_forward(const __grid_constant__ ForwardParams params) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  alignas(Own<C>) __shared__ std::uint8_t own_bytes[sizeof(Own<C>)];
  static_assert(sizeof(Own<C>) <= C::kOwnBytes);
  Own<C>& own = *reinterpret_cast<Own<C>*>(own_bytes);
  ItemOf<C>& item = own.items[0];
  if (threadIdx.x == 0) describe_rows<C>(params, 0, item);
  __syncthreads();  // all can read it
  if (!C::kTakesItems && item.valid == 0) return;
  Loader<C> loader(params, own, ptx::shared_address(shared));
  Products<C> products(loader.shared);
  if constexpr (!C::kTakesItems) return serve<C>(params, item, loader, products);
  if constexpr (C::kTakesItems) {
#pragma unroll 1
    while (item.round < params.work.order.rounds) {
      if (threadIdx.x == 0) {  // read behind the first barrier of this round
        describe_next<C>(params, item, loader.next_item());
      }
      if (item.valid != 0) serve<C>(params, item, loader, products);
      go_on<C>(own);
    }
  }
}

}  // namespace dspattn::cuda::general
