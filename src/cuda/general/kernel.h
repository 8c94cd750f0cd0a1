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
#include "cuda/general/masks.h"
#include "cuda/general/params.h"
#include "cuda/general/products.h"
#include "cuda/general/results.h"
#include "cuda/general/weigh.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::general {

// Of 16 rows, `row` being a lane's first within the CTA's.
template <typename C>
__device__ __forceinline__ ScorePlace place_of(const ForwardParams& params, const RowsItem& item, int tile, int row) {
  const tile::GroupRows& group = params.group;
  const int position = group.position(row);
  const auto head = [&](int r) { return min(group.head(r), group.heads - 1); };
  return {item.row_begin + position,
          params.tiles.first_key(tile),
          params.tiles.part(tile),
          own_thread() & 3,
          group.position(row + 8) - position,
          head(row),
          head(row + 8)};
}

// The scores of 16 rows as they are compared: what is masked is -inf. cap: 0, or the soft cap before a bias.
template <typename C>
__device__ __forceinline__ void finish_scores(const ForwardParams& params, const RowsItem& item, int tile, int block,
                                              float cap, float (&scores)[C::kTileK / 2]) {
  if (!C::kIsFp32 && params.score_scale != 1.0f) {
#pragma unroll
    for (float& score : scores) score *= params.score_scale;
  }
  ScorePlace at = place_of<C>(params, item, tile, own_row<C>() + 16 * block);
  at.cap = cap;
  if (params.bias.data != nullptr || params.allowed.data != nullptr) mask_by_tensors<C>(params, item, at, scores);
  if (item.lacks_pages != 0) mask_pages<C>(params, item.sequence, item.band.key_length, at, scores);
  if (tile < item.interior.begin || tile >= item.interior.end) mask_band<C>(params.tiles, item.band, at, scores);
}

// The scores of the K tile at `k`, masked. Of two passes the first chooses keys by scores as they were; in the second
// they are capped before a bias is added.
template <typename C>
__device__ __forceinline__ void score_tile(const TilePlace& at, Products<C>& products, std::uint32_t k) {
  products.compute_scores(at.tile == at.item.tiles.begin, k);
  const Extras& extras = at.params.extras;
  const float cap = extras.two_passes != 0 && pass_of(at.params, at.item) == 0 ? extras.cap : 0.0f;
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) finish_scores<C>(at.params, at.item, at.tile, i, cap, products.rows[i].scores);
}

// Selects and exponentiates a warp's scores of a tile.
template <typename C>
__device__ __forceinline__ void weigh_warp(const TilePlace& at, Products<C>& products) {
  auto& rows = products.rows;
  if constexpr (C::kIsFp32) {
#pragma unroll
    for (int i = 0; i < C::kRowBlocks; ++i) weigh_rows<C>(at, i, rows[i]);
  } else if constexpr (C::kRowBlocks == 2) {  // packed before anything else: half of the registers
    PackedTile<C> packed[2] = {PackedTile<C>(rows[0].scores), PackedTile<C>(rows[1].scores)};
    weigh_rows<C>(at, 0, packed[0], rows[0]);
    weigh_rows<C>(at, 1, packed[1], rows[1]);
  } else {
    PackedTile<C> packed(rows[0].scores);
    weigh_rows<C>(at, 0, packed, rows[0]);
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) general_forward(const __grid_constant__ ForwardParams params) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  alignas(RowsItem) __shared__ std::uint8_t item_bytes[sizeof(RowsItem)];
  RowsItem& item = *reinterpret_cast<RowsItem*>(item_bytes);
  if (threadIdx.x == 0) describe_rows<C>(params, item);
  __syncthreads();  // all can read it
  if (item.valid == 0) return;
  const tile::TileRange& tiles = item.tiles;
  const Loader<C> loader{params, item, ptx::shared_address(shared)};
  // 1: K and V come a tile ahead; 0: V beside the scores, K beside the output.
  const int ahead = params.stages >> 1;
  Products<C> products(loader.shared);
  const auto stage_of = [&](int tile) { return (tile - tiles.begin) & ahead; };
  if (tiles.begin < tiles.end) {
    if (params.pages.table != nullptr) look_for_pages<C>(params, item);
    loader.load_q();
  }
  if (params.extras.means.data != nullptr) clear_rest<C>(item);
    // Before the first tile there is only its K (and V) to ask for.
#pragma unroll 1
  for (int tile = tiles.begin - 1; tile < tiles.end; ++tile) {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    if (tile == tiles.begin) loader.finish_q();
    if (tile >= tiles.begin) {
      loader.finish_k(stage_of(tile));
      if (ahead != 0) loader.finish_v(stage_of(tile));
    }
    __syncthreads();  // this tile's K (and V) is there for all, and all have left the tile before
    const int next_v = tile + ahead;
    if (next_v < tiles.end && next_v >= tiles.begin && !loader.takes_turns()) loader.load_v(next_v, stage_of(next_v));
    if (ahead != 0 && tile + 1 < tiles.end) loader.load_k(tile + 1, stage_of(tile + 1));
    if (tile >= tiles.begin) {
      const TilePlace at{params, item, tile};
      do {
        score_tile<C>(at, products, loader.k_tile(stage_of(tile)));
        if (ahead == 0 && pass_of(params, item) == 0) loader.wait_for_v(tile);
        weigh_warp<C>(at, products);
      } while (!ends_tile(params, item));
    }
    if (ahead == 0 && tile + 1 < tiles.end && !loader.takes_turns()) loader.load_k(tile + 1, 0);
    if (tile >= tiles.begin && params.out.data != nullptr) products.add_output(loader.v_tile(stage_of(tile)));
    if (loader.takes_turns() && tile + 1 < tiles.end) {
      __syncthreads();  // all have left V
      loader.load_k(tile + 1, 0);
    }
  }
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) store_block<C>(params, item, own_row<C>() + 16 * i, products.rows[i]);
}

}  // namespace dspattn::cuda::general
