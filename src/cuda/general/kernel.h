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

// The walk over the keys, one tile after the other.
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
      kept_stage = (tile - tiles.begin) & 1;
      bare = ptx::opaque(params.bare_scores != 0 && tile >= interior.begin && tile < interior.end ? 1 : 0);
    }
    const auto stage = [&] { return C::kKeepsAddresses ? kept_stage : ahead == 0 ? 0 : (tile - tiles.begin) & 1; };
    loader.await_stage(tile, stage(), ahead);
    if (!C::kKeepsAddresses && ahead != 0) loader.load_ahead(tile, stage() ^ 1);
#pragma unroll 1
    for (int pass = C::kAll ? params.extras.choosing_passes : 0; pass >= 0; --pass) {
      if constexpr (C::kAll) {
        if (const int parts = item.group.parts(); parts > 1) loader.load_part(pass > 0 ? parts - pass : item.own_part);
      }
      const std::uint32_t k = loader.k_tile(stage());
      products.compute_scores(k);
      if (ahead == 0 && pass == 0) loader.wait_for_v(tile);
      if (C::kKeepsAddresses && ahead != 0) loader.load_ahead(tile, stage() ^ 1);  // beside the products
      weigh_warp<C>({params, item, tile, bare, pass}, products, [&](int part) { products.compute_scores(k, part); });
    }
    if (ahead == 0 && tile + 1 < tiles.end && !loader.takes_turns()) loader.load_k(tile + 1, 0);
    if (!C::kAll || params.out.data != nullptr) products.add_output(loader.v_tile(stage()));
    if (loader.takes_turns() && tile + 1 < tiles.end) {
      __syncthreads();  // all have left V
      loader.load_k(tile + 1, 0);
    }
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) general_forward(const __grid_constant__ ForwardParams params) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  alignas(ItemOf<C>) __shared__ std::uint8_t item_bytes[sizeof(ItemOf<C>)];
  static_assert(sizeof(ItemOf<C>) <= C::kOwnBytes);
  ItemOf<C>& item = *reinterpret_cast<ItemOf<C>*>(item_bytes);
  if (threadIdx.x == 0) describe_rows<C>(params, item);
  __syncthreads();  // all can read it
  if (item.valid == 0) return;
  Loader<C> loader(params, item, ptx::shared_address(shared));
  Products<C> products(loader.shared);
  if (params.pages.table != nullptr && item.tiles.begin < item.tiles.end) look_for_pages<C>(params, item);
  if constexpr (C::kAll) {
    if (params.extras.means.data != nullptr) clear_rest<C>(item);
  }
  walk<C>(params, item, loader, products);
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) store_block<C>(params, item, own_row<C>() + 16 * i, products.rows[i]);
}

}  // namespace dspattn::cuda::general
