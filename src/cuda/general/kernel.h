// Attention with scores pruned to N:M, one kernel for every card since Ampere and every pattern: scores on tensor cores
// (mma.sync), selection in registers, exponentials of what is kept, values on sparse tensor cores (mma.sp) where the
// hardware has the pattern and on dense ones with zeros elsewhere. Nothing of size n_q x n_k touches memory.
//
// A CTA takes kTileQ query rows of one (sequence, head); a warp owns 16 or 32 of them. K and V come by cp.async, one
// tile ahead (two stages), or where shared memory is short V beside the scores and the next K beside the output (one).
// See docs/general_kernel.md.
#pragma once

#include <cstdint>

#include "cuda/blocks/item.h"
#include "cuda/blocks/sink.h"
#include "cuda/blocks/work.h"
#include "cuda/general/copy.h"
#include "cuda/general/masks.h"
#include "cuda/general/params.h"
#include "cuda/general/products.h"
#include "cuda/general/weigh.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::general {

// The rows that a CTA works on; false: none.
template <typename C>
__device__ __forceinline__ bool describe_rows(const ForwardParams& params, Work& work) {
  const int index = static_cast<int>(blockIdx.x);
  const int sequence_head = index / params.row_tiles;
  // Last rows first: under a causal mask they see the most keys.
  const int row_tile = params.row_tiles - 1 - (index - sequence_head * params.row_tiles);
  const int sequence = params.work.heads.quotient(sequence_head);
  const int n_k = describe_sequence(params.work, sequence, work);
  work.head = params.work.heads.remainder(sequence_head);
  work.row_begin = row_tile * C::kTileQ;
  if (work.row_begin >= work.rows) return false;
  describe_keys<C>(params.work, n_k, work);
  return true;
}

// What masks and results need to know of them. It waits in shared memory: registers are short.
struct RowsItem : Item<1> {
  tile::RowBand band;
};

__device__ __forceinline__ void announce_rows(const ForwardParams& params, const Work& work, RowsItem& item) {
  item.row_begin = work.row_begin;
  item.rows = work.rows;
  item.sequence = work.sequence;
  item.head = work.head;
  const std::int64_t row = work.q_row + work.row_begin;
  item.out_offset = params.out.offset(work.batch, work.head, row);
  item.lse_offset = params.lse.offset(work.batch, work.head, row);
  item.band = work.band;
}

// Q's tile, and the ring of K's and V's.
template <typename C>
struct Loader {
  using PlaceQ = Swizzled<C::kTileQ>;
  using PlaceK = Swizzled<C::kTileK>;
  using PlaceV = std::conditional_t<C::kIsFp32, PlainRows<C::kVRowBytes>, Swizzled<C::kTileK>>;

  const ForwardParams& params;
  const std::uint8_t* k;  // of the sequence's key 0
  const std::uint8_t* v;
  int keys;              // of the sequence, as far as they are seen
  std::uint32_t shared;  // Q, then K and V of one stage after the other

  __device__ __forceinline__ std::uint32_t k_tile(int stage) const {
    return shared + static_cast<std::uint32_t>(C::kQBytes + stage * (C::kKBytes + C::kVBytes));
  }
  __device__ __forceinline__ std::uint32_t v_tile(int stage) const { return k_tile(stage) + C::kKBytes; }

  __device__ __forceinline__ void load_q(const Work& work) const {
    const Source q{row_of<C>(params.q, work.batch, work.head, work.q_row + work.row_begin),
                   params.q.row_stride * C::kElementBytes, work.rows - work.row_begin, params.d, params.vector_q};
    copy_any_rows<C, PlaceQ, C::kTileQ>(shared, q, [](int row) { return row; });
  }
  __device__ __forceinline__ void load_k(int tile, int stage) const {
    const tile::KeyTiles& tiles = params.tiles;
    const int span = tile / tiles.parts;
    const Source source{k, params.k.row_stride * C::kElementBytes, keys, params.d, params.vector_k};
    copy_tile<C, PlaceK>(
        k_tile(stage), source, tiles, span * tiles.span, tile - span * tiles.parts,
        [&](int part, int row) { return tile::key_of_column<C::kLayout, C::kTileK>(tiles, part, row); });
  }
  __device__ __forceinline__ void load_v(int tile, int stage) const {
    const tile::KeyTiles& tiles = params.tiles;
    const int span = tile / tiles.parts;
    const Source source{v, params.v.row_stride * C::kElementBytes, keys, params.d_v, params.vector_v};
    copy_tile<C, PlaceV>(v_tile(stage), source, tiles, span * tiles.span, tile - span * tiles.parts,
                         [&](int part, int row) {
                           return tile::key_of_v_row<C::kLayout, C::kTileK, C::kSplitsColumns>(tiles, part, row);
                         });
  }

  // What this thread has copied has arrived: Q times 2^-e, or everything rounded to tf32. The barrier that follows
  // shows it to the others.
  __device__ __forceinline__ void finish_q() const {
    each_own_chunk<C, PlaceQ, C::kTileQ>([&](std::uint32_t at) {
      if constexpr (C::kIsTf32) {
        round_chunk(shared + at);
      } else if constexpr (!C::kIsFp32) {
        scale_chunk<C>(shared + at, params.scales.q_scale);
      }
    });
  }
  __device__ __forceinline__ void finish_k(int stage) const {
    if constexpr (C::kIsTf32) {
      each_own_chunk<C, PlaceK, C::kTileK>([&](std::uint32_t at) { round_chunk(k_tile(stage) + at); });
    }
  }
  __device__ __forceinline__ void finish_v(int stage) const {
    if constexpr (C::kIsTf32) {
      each_own_chunk<C, PlaceV, C::kTileK>([&](std::uint32_t at) { round_chunk(v_tile(stage) + at); });
    }
  }
};

template <typename C>
__device__ __forceinline__ void store_block(const ForwardParams& params, const Item<1>& item, int row, int lane,
                                            const RowBlock<C>& block) {
  const RowSums sums = sum_up(block.state);
  store_lse<C>(params.lse, params.scales, item, row, lane, sums, block.state);
  if (C::kIsFp32 || params.fp32_out != 0) {
    store_rows<InFp32<C>>(params.out, params.vector_out, item, row, lane, block.out, sums);
  } else {
    store_rows<C>(params.out, params.vector_out, item, row, lane, block.out, sums);
  }
}

// Masks, selects and exponentiates the scores of tile `tile`, whose 16 * kRowBlocks rows begin at row `row` for this
// lane.
template <typename C>
__device__ __forceinline__ void weigh_warp(const ForwardParams& params, const RowsItem& item, Products<C>& products,
                                           int tile, int row, bool inside, bool first) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int span = tile / params.tiles.parts;
  const bool tensors = params.bias.data != nullptr || params.allowed.data != nullptr;
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) {
    RowBlock<C>& block = products.rows[i];
    if (!C::kIsFp32 && params.score_scale != 1.0f) {
#pragma unroll
      for (float& score : block.scores) score *= params.score_scale;
    }
    if (tensors || !inside) {
      mask_scores<C>(
          params, item,
          {item.row_begin + row + 16 * i, span * params.tiles.span, tile - span * params.tiles.parts, lane & 3, inside},
          block.scores);
    }
    weigh_rows<C>(params, block, lane, first);
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) general_forward(const __grid_constant__ ForwardParams params) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  Work work;
  if (!describe_rows<C>(params, work)) return;
  __shared__ RowsItem item;
  if (threadIdx.x == 0) announce_rows(params, work, item);
  __syncthreads();  // all can read it
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int last = min(work.row_begin + C::kTileQ, work.rows) - 1;
  const tile::TileRange tiles = tile::visible_tiles(params.tiles, work.band, work.row_begin, last);
  const tile::TileRange interior = tile::interior_tiles(params.tiles, work.band, work.row_begin, last);
  const int kv_head = params.work.heads_per_kv_head.quotient(work.head);
  const Loader<C> loader{params, row_of<C>(params.k, work.batch, kv_head, work.k_row),
                         row_of<C>(params.v, work.batch, kv_head, work.k_row), work.band.key_length,
                         ptx::shared_address(shared)};
  const bool ahead = params.stages == 2;  // K and V come a tile ahead
  Products<C> products(loader.shared, warp, lane);
  const int row = warp * 16 * C::kRowBlocks + (lane >> 2);

  if (tiles.begin < tiles.end) {
    loader.load_q(work);
    loader.load_k(tiles.begin, 0);
    if (ahead) loader.load_v(tiles.begin, 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    loader.finish_q();
    __syncthreads();  // Q is there for all
    products.take_q();
  }
  int stage = 0;
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    ptx::cp_async_wait<0>();
    loader.finish_k(stage);
    if (ahead) loader.finish_v(stage);
    __syncthreads();  // this tile's K (and V) is there for all, and all have left the tile before
    if (ahead) {
      if (tile + 1 < tiles.end) {
        loader.load_k(tile + 1, stage ^ 1);
        loader.load_v(tile + 1, stage ^ 1);
      }
    } else {
      loader.load_v(tile, 0);
    }
    ptx::cp_async_commit();
    products.compute_scores(loader.k_tile(stage));
    if (!ahead) {
      ptx::cp_async_wait<0>();
      loader.finish_v(0);
      __syncthreads();  // V is there for all, and all have left K
      if (tile + 1 < tiles.end) loader.load_k(tile + 1, 0);
      ptx::cp_async_commit();
    }
    weigh_warp<C>(params, item, products, tile, row, tile >= interior.begin && tile < interior.end,
                  tile == tiles.begin);
    products.add_output(loader.v_tile(stage));
    if (ahead) stage ^= 1;
  }
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) store_block<C>(params, item, row + 16 * i, lane, products.rows[i]);
}

}  // namespace dspattn::cuda::general
