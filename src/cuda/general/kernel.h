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

// What a CTA works on. It waits in shared memory until it is needed: registers are short.
struct RowsItem : Item<1> {
  tile::RowBand band;
  tile::TileRange tiles, interior;  // that any row sees; that all rows see all keys of
  const std::uint8_t* q;            // of the tile's first row
  const std::uint8_t* k;            // of the sequence's key 0
  const std::uint8_t* v;
};

// For one thread. valid: 0 where there are no rows.
template <typename C>
__device__ __forceinline__ void describe_rows(const ForwardParams& params, RowsItem& item) {
  const int index = static_cast<int>(blockIdx.x);
  const int sequence_head = index / params.row_tiles;
  Work work;
  const int n_k = describe_sequence(params.work, params.work.heads.quotient(sequence_head), work);
  work.head = params.work.heads.remainder(sequence_head);
  // Last rows first: under a causal mask they see the most keys.
  work.row_begin = (params.row_tiles - 1 - (index - sequence_head * params.row_tiles)) * C::kTileQ;
  item.valid = work.row_begin < work.rows ? 1 : 0;
  if (item.valid == 0) return;
  describe_keys<C>(params.work, n_k, work);
  item.row_begin = work.row_begin;
  item.rows = work.rows;
  item.sequence = work.sequence;
  item.head = work.head;
  const std::int64_t row = work.q_row + work.row_begin;
  item.out_offset = params.out.offset(work.batch, work.head, row);
  item.lse_offset = params.lse.offset(work.batch, work.head, row);
  item.band = work.band;
  const int last = min(work.row_begin + C::kTileQ, work.rows) - 1;
  item.tiles = tile::visible_tiles(params.tiles, work.band, work.row_begin, last);
  item.interior = tile::interior_tiles(params.tiles, work.band, work.row_begin, last);
  const int kv_head = params.work.heads_per_kv_head.quotient(work.head);
  const auto row_of = [&](const RowsView& view, int head, std::int64_t at) {
    return static_cast<const std::uint8_t*>(view.data) + view.offset(work.batch, head, at) * C::kElementBytes;
  };
  item.q = row_of(params.q, work.head, row);
  item.k = row_of(params.k, kv_head, work.k_row);
  item.v = row_of(params.v, kv_head, work.k_row);
}

// Q's tile, and the stages of K's and V's.
template <typename C>
struct Loader {
  using PlaceQ = Swizzled<C::kTileQ>;
  using PlaceK = Swizzled<C::kTileK>;
  using PlaceV = std::conditional_t<C::kIsFp32, PlainRows<C::kVRowBytes>, Swizzled<C::kTileK>>;

  const ForwardParams& params;
  const RowsItem& item;
  std::uint32_t shared;  // Q, then K and V of one stage after the other

  __device__ __forceinline__ std::uint32_t k_tile(int stage) const {
    return shared + static_cast<std::uint32_t>(C::kQBytes + stage * (C::kKBytes + C::kVBytes));
  }
  __device__ __forceinline__ std::uint32_t v_tile(int stage) const { return k_tile(stage) + C::kKBytes; }

  __device__ __forceinline__ void load_q() const {
    const Source source{item.q, params.q.row_stride * C::kElementBytes, item.rows - item.row_begin, params.d,
                        params.vector_q};
    copy_any_rows<C, PlaceQ, C::kTileQ>(shared, source, [](int row) { return row; });
  }
  __device__ __forceinline__ void load_k(int tile, int stage) const {
    const tile::KeyTiles& tiles = params.tiles;
    const Source source{item.k, params.k.row_stride * C::kElementBytes, item.band.key_length, params.d,
                        params.vector_k};
    copy_tile<C, PlaceK>(k_tile(stage), source, tiles, tiles.first_key(tile), tiles.part(tile), [&](int part, int row) {
      return tile::key_of_column<C::kLayout, C::kTileK>(tiles, part, row);
    });
  }
  __device__ __forceinline__ void load_v(int tile, int stage) const {
    const tile::KeyTiles& tiles = params.tiles;
    const Source source{item.v, params.v.row_stride * C::kElementBytes, item.band.key_length, params.d_v,
                        params.vector_v};
    copy_tile<C, PlaceV>(v_tile(stage), source, tiles, tiles.first_key(tile), tiles.part(tile), [&](int part, int row) {
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

// Row g of a lane's first 16 rows, within the CTA's.
template <typename C>
__device__ __forceinline__ int own_row() {
  const int thread = own_thread();
  return (thread >> 5) * 16 * C::kRowBlocks + ((thread & 31) >> 2);
}

// A logit without a value in the softmax of one of a lane's two rows (kRow 0: row g, 1: row g + 8); its weight is added
// to the row's sum.
template <typename C, int kRow>
__device__ __forceinline__ void add_sink(const ScoreScales& scales, float sink, float& sum, float& minus,
                                         float (&out)[C::kHeadDim / 2]) {
  constexpr float kLog2E = 1.442695040888963f;
  const float logit = sink * kLog2E;  // base 2, as the reference below
  const float unit = C::kReferenceIsScore ? scales.exp2_scale : 1.0f;
  const bool empty = sum == 0;
  const float reference = -minus * unit;  // of scores near the largest fp32: infinite
  if (!empty && !(logit > reference)) {
    sum += ptx::exp2_fast(logit - reference);
    return;
  }
  // The sink is the reference now.
  const float shrink = empty ? 0.0f : ptx::exp2_fast(reference - logit);
  sum = sum * shrink + 1.0f;
  minus = -logit / unit;
#pragma unroll
  for (int i = 2 * kRow; i < C::kHeadDim / 2; i += 4) {
    out[i] = empty ? 0.0f : out[i] * shrink;  // whatever V holds
    out[i + 1] = empty ? 0.0f : out[i + 1] * shrink;
  }
}

template <typename C>
__device__ __forceinline__ void store_block(const ForwardParams& params, const RowsItem& item, int row,
                                            RowBlock<C>& block) {
  const int lane = own_thread() & 31;
  RowSums sums = sum_up(block.state);
  if (params.sinks != nullptr) {
    const float sink = params.sinks[item.head * params.sink_stride];
    if (sink != -INFINITY) {
      add_sink<C, 0>(params.scales, sink, sums.sum0, block.state.minus0, block.out);
      add_sink<C, 1>(params.scales, sink, sums.sum1, block.state.minus1, block.out);
    }
  }
  store_lse<C>(params.lse, params.scales, item, row, lane, sums, block.state);
  if (C::kIsFp32 || params.fp32_out != 0) {
    store_rows<InFp32<C>>(params.out, params.vector_out, item, row, lane, block.out, sums);
  } else {
    store_rows<C>(params.out, params.vector_out, item, row, lane, block.out, sums);
  }
}

// The scores of 16 rows as they are compared: what is masked is -inf.
template <typename C>
__device__ __forceinline__ void finish_scores(const ForwardParams& params, const RowsItem& item, int tile, int block,
                                              float (&scores)[C::kTileK / 2]) {
  if (!C::kIsFp32 && params.score_scale != 1.0f) {
#pragma unroll
    for (float& score : scores) score *= params.score_scale;
  }
  const ScorePlace at{item.row_begin + own_row<C>() + 16 * block, params.tiles.first_key(tile), params.tiles.part(tile),
                      own_thread() & 3};
  if (params.bias.data != nullptr || params.allowed.data != nullptr) mask_by_tensors<C>(params, item, at, scores);
  if (tile < item.interior.begin || tile >= item.interior.end) mask_band<C>(params.tiles, item.band, at, scores);
}

// Masks, selects and exponentiates a warp's scores of tile `tile`.
template <typename C>
__device__ __forceinline__ void weigh_warp(const ForwardParams& params, const RowsItem& item, Products<C>& products,
                                           int tile) {
  auto& rows = products.rows;
  const int lane = own_thread() & 31;
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) finish_scores<C>(params, item, tile, i, rows[i].scores);
  if constexpr (C::kIsFp32) {
#pragma unroll
    for (RowBlock<C>& block : rows) weigh_rows<C>(params, block, lane);
  } else if constexpr (C::kRowBlocks == 2) {  // packed before anything else: half of the registers
    PackedTile<C> packed[2] = {PackedTile<C>(rows[0].scores), PackedTile<C>(rows[1].scores)};
    weigh_rows<C>(params, packed[0], rows[0], lane, tile == item.tiles.begin);
    weigh_rows<C>(params, packed[1], rows[1], lane, tile == item.tiles.begin);
  } else {
    PackedTile<C> packed(rows[0].scores);
    weigh_rows<C>(params, packed, rows[0], lane, tile == item.tiles.begin);
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
  const Loader<C> loader{params, item, ptx::shared_address(shared)};
  const int ahead = params.stages - 1;  // 1: K and V come a tile ahead; 0: V beside the scores, K beside the output
  Products<C> products(loader.shared);
  const auto stage_of = [&](int tile) { return (tile - item.tiles.begin) & ahead; };
  if (item.tiles.begin < item.tiles.end) loader.load_q();
    // Before the first tile there is only its K (and V) to ask for.
#pragma unroll 1
  for (int tile = item.tiles.begin - 1; tile < item.tiles.end; ++tile) {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    if (tile == item.tiles.begin) loader.finish_q();
    if (tile >= item.tiles.begin) {
      loader.finish_k(stage_of(tile));
      if (ahead != 0) loader.finish_v(stage_of(tile));
    }
    __syncthreads();  // this tile's K (and V) is there for all, and all have left the tile before
    const int next_v = tile + ahead;
    if (next_v < item.tiles.end && next_v >= item.tiles.begin) loader.load_v(next_v, stage_of(next_v));
    if (ahead != 0 && tile + 1 < item.tiles.end) loader.load_k(tile + 1, stage_of(tile + 1));
    if (tile >= item.tiles.begin) {
      products.compute_scores(tile == item.tiles.begin, loader.k_tile(stage_of(tile)));
      if (ahead == 0) {
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        loader.finish_v(0);
        __syncthreads();  // V is there for all, and all have left K
      }
      weigh_warp<C>(params, item, products, tile);
    }
    if (ahead == 0 && tile + 1 < item.tiles.end) loader.load_k(tile + 1, 0);
    if (tile >= item.tiles.begin) products.add_output(loader.v_tile(stage_of(tile)));
  }
#pragma unroll
  for (int i = 0; i < C::kRowBlocks; ++i) store_block<C>(params, item, own_row<C>() + 16 * i, products.rows[i]);
}

}  // namespace dspattn::cuda::general
