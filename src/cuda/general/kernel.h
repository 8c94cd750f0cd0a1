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
__device__ __forceinline__ ScorePlace place_of(const TilePlace<C>& at, int row) {
  const tile::KeyTiles& tiles = at.params.tiles;
  ScorePlace place{at.item.row_begin + row, tiles.first_key(at.tile), tiles.part(at.tile), own_thread() & 3};
  if constexpr (C::kAll) {
    const tile::GroupRows& group = at.params.group;
    const auto head = [&](int r) { return min(group.head(r), group.heads - 1); };
    place.row = at.item.row_begin + group.position(row);
    place.below = group.position(row + 8) - group.position(row);
    place.head = head(row);
    place.head_below = head(row + 8);
    if (at.params.extras.two_passes != 0 && at.pass == 0) place.cap = at.params.extras.cap;
  }
  return place;
}

// The scores of 16 rows as they are compared: what is masked is -inf.
template <typename C>
__device__ __forceinline__ void finish_scores(const TilePlace<C>& at, int block, float (&scores)[C::kTileK / 2]) {
  const ForwardParams& params = at.params;
  const RowsItem& item = at.item;
  if (!C::kIsFp32 && params.score_scale != 1.0f) {
#pragma unroll
    for (float& score : scores) score *= params.score_scale;
  }
  const ScorePlace place = place_of<C>(at, own_row<C>() + 16 * block);
  if (params.bias.data != nullptr || params.allowed.data != nullptr) mask_by_tensors<C>(params, item, place, scores);
  if (item.lacks_pages != 0) mask_pages<C>(params, item.sequence, item.band.key_length, place, scores);
  if (at.tile < item.interior.begin || at.tile >= item.interior.end) {
    mask_band<C>(params.tiles, item.band, place, scores);
  }
}

// Masks, selects and exponentiates a warp's scores of a tile.
template <typename C>
__device__ __forceinline__ void weigh_warp(const TilePlace<C>& at, Products<C>& products) {
  auto& rows = products.rows;
  const tile::TileRange interior = at.item.interior;
  if (at.params.bare_scores == 0 || at.tile < interior.begin || at.tile >= interior.end) {
#pragma unroll
    for (int i = 0; i < C::kRowBlocks; ++i) finish_scores<C>(at, i, rows[i].scores);
  }
  if constexpr (C::kAll && !C::kIsFp32) {
    if (at.params.extras.cap != 0) tell_from_masked<C>(rows[0].scores);
  }
  if constexpr (C::kWeighsUnselected) {
    if (at.params.keep == 0 && weigh_unselected<C>(at, rows)) return;
  }
  if constexpr (C::kIsFp32) {
#pragma unroll
    for (RowBlock<C>& block : rows) weigh_rows<C>(at, block);
  } else if constexpr (C::kRowBlocks == 2) {  // packed before anything else: half of the registers
    PackedTile<C> packed[2] = {PackedTile<C>(rows[0].scores), PackedTile<C>(rows[1].scores)};
    weigh_rows<C>(at, packed, rows);
  } else {
    PackedTile<C> packed[1] = {PackedTile<C>(rows[0].scores)};
    weigh_rows<C>(at, packed, rows);
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
  std::conditional_t<C::kHasRegisters, const tile::TileRange, const tile::TileRange&> tiles = item.tiles;
  Loader<C> loader(params, item, ptx::shared_address(shared));
  // K and V come so many tiles ahead, one or two. 0: V beside the scores, K beside the output.
  const int ahead = (params.stages >> 1) * params.tiles_a_stage;
  Products<C> products(loader.shared);
  const auto stage_of = [&](int tile) { return ahead == 0 ? 0 : (tile - tiles.begin) & (2 * ahead - 1); };
  if (tiles.begin < tiles.end) {
    if (params.pages.table != nullptr) look_for_pages<C>(params, item);
    loader.load_q();
  }
  if constexpr (C::kAll) {
    if (params.extras.means.data != nullptr) clear_rest<C>(item);
  }
  loader.begin(ahead);
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    if (ahead == 0 || stage_of(tile) % ahead == 0) loader.next_stage(tile, ahead);
      // Keys are chosen by scores without a cap: where a bias comes after it, in a pass of their own.
#pragma unroll 1
    for (int pass = C::kAll ? params.extras.two_passes : 0; pass >= 0; --pass) {
      products.compute_scores(tile == tiles.begin, loader.k_tile(stage_of(tile)));
      if (ahead == 0 && pass == 0) loader.wait_for_v(tile);
      weigh_warp<C>({params, item, tile, pass}, products);
    }
    if (ahead == 0 && tile + 1 < tiles.end && !loader.takes_turns()) loader.load_k(tile + 1, 0);
    if (!C::kAll || params.out.data != nullptr) products.add_output(loader.v_tile(stage_of(tile)));
    if (loader.takes_turns() && tile + 1 < tiles.end) {
      __syncthreads();  // all have left V
      loader.load_k(tile + 1, 0);
    }
  }
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) store_block<C>(params, item, own_row<C>() + 16 * i, products.rows[i]);
}

}  // namespace dspattn::cuda::general
