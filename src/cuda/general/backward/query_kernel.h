// dQ, by a CTA that owns query rows and walks the key tiles that they see; nothing is added across CTAs. The same walk
// makes the gradient of a bias, which is dS summed over what the bias is broadcast over, and, where an LSE is too
// large to tell anything of its row's weights, finds the row's largest score and sum. See docs/general_backward.md.
//
// A warp owns 16 or 32 rows; K and V come a tile ahead where shared memory allows.
#pragma once

#include <cstdint>

#include "cuda/general/backward/bias_sums.h"
#include "cuda/general/backward/references.h"
#include "cuda/general/backward/scores.h"
#include "cuda/general/backward/walk.h"
#include "cuda/ptx/address.h"

namespace dspattn::cuda::general::backward {

// What a CTA works on, one tile of rows after the other; there is more than one for the gradient of a bias alone. It
// waits in shared memory until it is needed: registers are short.
struct QueryItem {
  int tiles_of_rows;  // that there are
  BiasPart bias;
  SequenceRows sequence;
  ScoreItem score;
  int row_begin;
  int kv_head;
  tile::TileRange tiles;  // key tiles
  std::int64_t prepared_row;
};

// Tile of rows number `number` of the CTA's.
template <typename C>
__device__ __forceinline__ void describe_rows(const BackwardParams& params, int number, QueryItem& item) {
  auto index = static_cast<int>(blockIdx.x);
  int sequence, head, row_tile;
  if (params.target == Target::bias) {
    if (number == 0) item.bias = bias_part(params, index);
    const BiasPlace place = place_of_rows(item.bias, number);
    sequence = place.sequence;
    head = place.head;
    row_tile = place.row_tile;
    item.tiles_of_rows = item.bias.tiles_of_rows;
  } else {
    if (params.target == Target::queries) index /= C::Queries::kColumnParts;
    const int sequence_head = index / params.row_tiles;
    sequence = params.work.heads.quotient(sequence_head);
    head = params.work.heads.remainder(sequence_head);
    // Last rows first: under a causal mask they see the most keys.
    row_tile = params.row_tiles - 1 - (index - sequence_head * params.row_tiles);
    item.tiles_of_rows = 1;
  }
  item.sequence = sequence_rows(params, sequence);
  item.score = {item.sequence.rows, sequence, head, item.sequence.band};
  item.row_begin = row_tile * C::Queries::kTileQ;
  item.kv_head = params.work.heads_per_kv_head.quotient(head);
  item.prepared_row = head * params.prepared.head_rows + item.sequence.prepared_row + item.row_begin;
  const int last = min(item.row_begin + C::Queries::kTileQ, item.sequence.rows) - 1;
  item.tiles = tile::visible_tiles(params.tiles, item.sequence.band, item.row_begin, last);
  if (params.target == Target::bias) {
    item.tiles.begin = max(item.tiles.begin, item.bias.key_tiles.begin);
    item.tiles.end = max(item.tiles.begin, min(item.tiles.end, item.bias.key_tiles.end));
  }
}

// Shared memory: Q, dO and numbers of the rows; stages of K and V.
template <typename C>
struct QueryMemory {
  using Q = typename C::Queries;
  std::uint32_t shared;

  __device__ __forceinline__ std::uint32_t q() const { return shared; }
  __device__ __forceinline__ std::uint32_t d_out() const { return shared + Q::kTileQ * C::kStride; }
  __device__ __forceinline__ std::uint32_t numbers() const { return shared + 2 * Q::kTileQ * C::kStride; }
  __device__ __forceinline__ std::uint32_t keys(int stage) const {
    return shared + static_cast<std::uint32_t>(Q::kRowsBytes + stage * C::kKeysBytes);
  }
  __device__ __forceinline__ std::uint32_t values(int stage) const {
    return keys(stage) + static_cast<std::uint32_t>(C::kTileK * C::kStride);
  }
};

template <typename C>
struct QueryLoader {
  using Q = typename C::Queries;
  const BackwardParams& params;
  const QueryItem& item;
  QueryMemory<C> memory;

  __device__ __forceinline__ void load_rows() const {
    const Prepared& p = params.prepared;
    const std::int64_t row = item.prepared_row;
    copy_bytes<Q::kThreads, Q::kTileQ * C::kStride>(memory.q(), p.q + row * C::kStride);
    copy_bytes<Q::kThreads, Q::kTileQ * C::kStride>(memory.d_out(), p.d_out + row * C::kStride);
    copy_bytes<Q::kThreads, Q::kTileQ * C::kNumberBytes>(memory.numbers(), p.numbers + row);
  }
  __device__ __forceinline__ void load_keys(int tile, int stage) const {
    const Prepared& p = params.prepared;
    const std::int64_t at = item.kv_head * p.head_tiles + item.sequence.prepared_tile + tile;
    copy_bytes<Q::kThreads, C::kKeysBytes>(memory.keys(stage), p.keys + at * C::kKeysBytes);
  }
};

template <typename C>
using QuerySums = float[C::Queries::kRowBlocks][C::Queries::kColumns / 2];

// Of the CTA's: a warp's first row.
template <typename C>
__device__ __forceinline__ int warp_row() {
  return (own_thread() >> 5) * 16 * C::Queries::kRowBlocks;
}

// Of dQ: the first of the CTA's columns.
template <typename C>
__device__ __forceinline__ int first_column() {
  return static_cast<int>(blockIdx.x) % C::Queries::kColumnParts * C::Queries::kColumns;
}

// One key tile: its part of what is asked for is added to the sums.
template <typename C>
__device__ __forceinline__ void add_tile(const BackwardParams& params, const QueryItem& item,
                                         const QueryMemory<C>& memory, int tile, int stage, QuerySums<C>& sums) {
  using Q = typename C::Queries;
  const auto rows = [](int bytes) { return static_cast<std::uint32_t>(warp_row<C>() * bytes); };
  const int first_key = params.tiles.first_key(tile);
  const TilePlace place{memory.q() + rows(C::kStride),
                        memory.d_out() + rows(C::kStride),
                        memory.numbers() + rows(C::kNumberBytes),
                        memory.keys(stage),
                        memory.values(stage),
                        item.row_begin + warp_row<C>(),
                        first_key,
                        params.tiles.part(tile),
                        tile::sees_span(params.tiles, item.score.band, first_key, item.row_begin,
                                        min(item.row_begin + Q::kTileQ, item.score.rows) - 1)};
  Block<C> weights[Q::kRowBlocks], d_scores[Q::kRowBlocks];
  if (params.target == Target::references) {
    Slopes<C> slopes[Q::kRowBlocks];
    make_scores<C>(params, item.score, place, weights, slopes);
#pragma unroll
    for (int i = 0; i < Q::kRowBlocks; ++i) add_to_references<C>(params.scales.exp2_scale, weights[i], sums[i]);
    return;
  }
  make_weights<C>(params, item.score, place, weights, d_scores, [](int, const Block<C>&) {});
  if (params.target == Target::queries) {
    return add_queries<C>(sums, d_scores,
                          memory.keys(stage) + static_cast<std::uint32_t>(first_column<C>() * C::kElementBytes));
  }
#pragma unroll
  for (int i = 0; i < Q::kRowBlocks; ++i) {
#pragma unroll
    for (int e = 0; e < C::kTileK / 2; ++e) sums[i][e] += d_scores[i][e];
  }
}

template <typename C>
__device__ __forceinline__ void store_queries(const BackwardParams& params, const QueryItem& item,
                                              const QuerySums<C>& sums) {
#pragma unroll
  for (int i = 0; i < 2 * C::Queries::kRowBlocks; ++i) {
    const int row = item.row_begin + warp_row<C>() + 8 * i + static_cast<int>(own_lane() >> 2);
    if (row >= item.score.rows) continue;
    const std::int64_t offset = params.d_q.offset(item.sequence.batch, item.score.head, item.sequence.q_row + row);
#pragma unroll
    for (int c = 0; c < C::Queries::kColumns / 8; ++c) {
      const float* from = sums[i / 2] + 4 * c + i % 2 * 2;
      store_pair<C::kType>(params.d_q, params.fp32_d_q != 0, offset,
                           first_column<C>() + 8 * c + 2 * static_cast<int>(own_lane() & 3), from[0] * params.d_q_scale,
                           from[1] * params.d_q_scale);
    }
  }
}

template <typename C>
__global__ void __launch_bounds__(C::Queries::kThreads, C::Queries::kCtas)
    general_query_gradients(const __grid_constant__ BackwardParams params) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 128);
  alignas(QueryItem) __shared__ std::uint8_t item_bytes[sizeof(QueryItem)];
  QueryItem& item = *reinterpret_cast<QueryItem*>(item_bytes);
  const QueryLoader<C> loader{params, item, {ptx::shared_address(shared)}};
  const int ahead = params.query_stages - 1;  // 1: K and V come a tile ahead
  QuerySums<C> sums;
  clear_sums<C>(params.target, sums);
  int number = 0;
#pragma unroll 1
  do {
    __syncthreads();  // all have left the rows before
    if (threadIdx.x == 0) describe_rows<C>(params, number, item);
    __syncthreads();  // all can read it
    if (item.row_begin >= item.score.rows) continue;
    if (params.target == Target::references && !any_far<C>(params, item)) return;
    if (item.tiles.begin < item.tiles.end) {
      loader.load_rows();
      loader.load_keys(item.tiles.begin, 0);
    }
#pragma unroll 1
    for (int tile = item.tiles.begin; tile < item.tiles.end; ++tile) {
      const int stage = (tile - item.tiles.begin) & ahead;
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();  // this tile is there for all, and all have left the one before
      if (ahead != 0 && tile + 1 < item.tiles.end) loader.load_keys(tile + 1, stage ^ 1);
      add_tile<C>(params, item, loader.memory, tile, stage, sums);
      if (ahead == 0 && tile + 1 < item.tiles.end) {
        __syncthreads();  // all have left K and V
        loader.load_keys(tile + 1, 0);
      }
    }
  } while (++number < item.tiles_of_rows);
  if (params.target == Target::queries) {
    if (item.row_begin < item.score.rows) store_queries<C>(params, item, sums);
  } else if (params.target == Target::bias) {
    store_bias<C>(params, item.bias, loader.memory.q(), sums);
  } else {
    store_references<C>(params, item, sums);
  }
}

}  // namespace dspattn::cuda::general::backward
