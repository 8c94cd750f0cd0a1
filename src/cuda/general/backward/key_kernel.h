// dK and dV. A CTA owns tiles of 32 keys, whose K and V stay in shared memory, and walks the query tiles that see them,
// of all heads that share the key head; nothing is added across CTAs.
//
// kSplit warps share a key tile: each makes scores, weights and dS of its part of the query rows, rows being queries as
// in the forward, and stores weights and dS to shared memory; then each adds all rows to its part of the columns of dK
// and dV, which stay in registers. See docs/general_backward.md.
#pragma once

#include <cstdint>

#include "cuda/general/backward/scores.h"
#include "cuda/general/backward/walk.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/ordered_sums.h"
#include "cuda/tile/gradient_walk.h"

namespace dspattn::cuda::general::backward {

// What a CTA works on. It waits in shared memory until it is needed: registers are short.
struct KeyItem {
  SequenceRows sequence;
  ScoreItem score;       // its head is that of the step
  int first_tile;        // of the sequence's key tiles
  tile::TileRange rows;  // query tiles
  int walk;              // the first of them
  int first_head, kv_head;
};

template <typename C>
__device__ __forceinline__ void describe_keys(const BackwardParams& params, KeyItem& item) {
  using K = typename C::Keys;
  // Where dQ is added up in order, a CTA waits for those of lower numbers only: numbers are taken as CTAs begin, the
  // last keys of a sequence first (tile/gradient_walk.h).
  const bool ordered = K::kAddsQueries && params.adds_queries != 0;
  const int index = ordered ? atomicAdd(params.prepared.taken, 1) : static_cast<int>(blockIdx.x);
  const int sequence_head = index / params.key_groups;
  const int sequence = sequence_head / params.kv_heads;
  item.kv_head = sequence_head - sequence * params.kv_heads;
  item.first_head = item.kv_head * params.work.heads_per_kv_head.value;
  const int group = index - sequence_head * params.key_groups;
  item.first_tile = (ordered ? params.key_groups - 1 - group : group) * K::kTiles;
  item.sequence = sequence_rows(params, sequence);
  item.score = {item.sequence.rows, sequence, item.first_head, item.sequence.band};
  const int begin = params.tiles.first_key(item.first_tile);
  const int end = params.tiles.first_key(item.first_tile + K::kTiles - 1) + params.tiles.span;
  const tile::RowBand& band = item.sequence.band;
  if (ordered) {  // every part of a block of 128 keys has the same rows, so that shares can be counted
    const int block = item.first_tile / kTileUnit;
    item.rows = tile::query_tiles_of(band, item.sequence.rows, block, K::kTileQ);
    item.walk = tile::first_of_walk(item.rows, block, K::kTileQ, params.wraps != 0);
  } else {
    item.rows = tile::row_tiles_that_see(band, item.sequence.rows, begin, end, K::kTileQ);
    item.walk = item.rows.begin;
  }
}

// Shared memory: K and V of every key tile; weights and dS of every key tile; stages of Q, dO and numbers.
template <typename C>
struct KeyMemory {
  using K = typename C::Keys;
  std::uint32_t shared;

  __device__ __forceinline__ std::uint32_t keys(int tile) const {
    return shared + static_cast<std::uint32_t>(tile * C::kKeysBytes);
  }
  __device__ __forceinline__ std::uint32_t values(int tile) const {
    return keys(tile) + static_cast<std::uint32_t>(C::kTileK * C::kStride);
  }
  __device__ __forceinline__ std::uint32_t weights(int tile) const {
    if constexpr (K::kWeightsOverKeys) return keys(tile);
    return shared + static_cast<std::uint32_t>(K::kTiles * C::kKeysBytes + tile * 2 * K::kWeightBytes);
  }
  __device__ __forceinline__ std::uint32_t d_scores(int tile) const {
    return K::kWeightsOverKeys ? values(tile) : weights(tile) + K::kWeightBytes;
  }
  __device__ __forceinline__ std::uint32_t q(int stage) const {
    return shared + static_cast<std::uint32_t>(K::kFixedBytes + stage * K::kRowsBytes);
  }
  __device__ __forceinline__ std::uint32_t d_out(int stage) const { return q(stage) + K::kTileQ * C::kStride; }
  __device__ __forceinline__ std::uint32_t numbers(int stage) const { return d_out(stage) + K::kTileQ * C::kStride; }
};

// A step: a query tile of one of the heads.
struct Step {
  int head;
  int tile;
};
__device__ __forceinline__ Step step_of(const KeyItem& item, int step) {
  const int count = item.rows.count();
  const int head = step / count;
  return {item.first_head + head, tile::tile_of_step(item.rows, item.walk, step - head * count)};
}

template <typename C>
__device__ __forceinline__ const std::uint8_t* prepared_keys(const BackwardParams& params, const KeyItem& item) {
  const Prepared& p = params.prepared;
  return p.keys + (item.kv_head * p.head_tiles + item.sequence.prepared_tile + item.first_tile) * C::kKeysBytes;
}

template <typename C>
__device__ __forceinline__ void load_rows(const BackwardParams& params, const KeyItem& item, const KeyMemory<C>& memory,
                                          int step, int stage) {
  using K = typename C::Keys;
  const Step of = step_of(item, step);
  const std::int64_t row =
      of.head * params.prepared.head_rows + item.sequence.prepared_row + static_cast<std::int64_t>(of.tile) * K::kTileQ;
  copy_bytes<K::kThreads, K::kTileQ * C::kStride>(memory.q(stage), params.prepared.q + row * C::kStride);
  copy_bytes<K::kThreads, K::kTileQ * C::kStride>(memory.d_out(stage), params.prepared.d_out + row * C::kStride);
  copy_bytes<K::kThreads, K::kTileQ * C::kNumberBytes>(memory.numbers(stage), params.prepared.numbers + row);
  if (K::kWeightsOverKeys || step == 0) {
    copy_bytes<K::kThreads, K::kTiles * C::kKeysBytes>(memory.keys(0), prepared_keys<C>(params, item));
  }
}

// A warp's key tile of the CTA's, and which of the tile's warps it is.
template <typename C>
__device__ __forceinline__ int own_tile() {
  return (own_thread() >> 5) / C::Keys::kSplit;
}
template <typename C>
__device__ __forceinline__ int own_part() {
  return (own_thread() >> 5) % C::Keys::kSplit;
}

// Weights and dS of this warp's rows of a query tile, to shared memory.
template <typename C>
__device__ __forceinline__ void weigh_rows(const BackwardParams& params, const KeyItem& item,
                                           const KeyMemory<C>& memory, int step, int stage) {
  using K = typename C::Keys;
  const Step of = step_of(item, step);
  const int tile = own_tile<C>();
  const int own = own_part<C>() * 16 * K::kRowBlocks;  // of the query tile
  const int first = of.tile * K::kTileQ;
  const int first_key = params.tiles.first_key(item.first_tile + tile);
  const auto rows = [own](int bytes) { return static_cast<std::uint32_t>(own * bytes); };
  const TilePlace place{
      memory.q(stage) + rows(C::kStride),
      memory.d_out(stage) + rows(C::kStride),
      memory.numbers(stage) + rows(C::kNumberBytes),
      memory.keys(tile),
      memory.values(tile),
      first + own,
      first_key,
      params.tiles.part(item.first_tile + tile),
      tile::sees_span(params.tiles, item.score.band, first_key, first, min(first + K::kTileQ, item.score.rows) - 1)};
  const ScoreItem whose{item.score.rows, item.score.sequence, of.head, item.score.band};
  const auto at = [&](int block) {
    return rows(K::kWeightStride) + static_cast<std::uint32_t>(16 * block * K::kWeightStride);
  };
  Block<C> weights[K::kRowBlocks], d_scores[K::kRowBlocks];
  make_weights<C>(params, whose, place, weights, d_scores, [&](int block, const Block<C>& left) {
    if constexpr (K::kWeightsOverKeys) __syncwarp();  // all lanes have read K, whose place is written now
    store_weights<C>(memory.weights(tile) + at(block), left);
  });
  if constexpr (K::kWeightsOverKeys) __syncwarp();  // and V
#pragma unroll
  for (int i = 0; i < K::kRowBlocks; ++i) store_weights<C>(memory.d_scores(tile) + at(i), d_scores[i]);
}

// This CTA's share of a query tile's dQ, added when all shares before it are in.
template <typename C>
__device__ __forceinline__ void add_queries_in_turn(const BackwardParams& params, const KeyItem& item,
                                                    const KeyMemory<C>& memory, int step) {
  using K = typename C::Keys;
  using S = ShareShape<C>;
  const int warp = own_thread() >> 5;
  Share<C> share = {};
#pragma unroll
  for (int tile = 0; tile < K::kTiles; ++tile) {
    add_share<C>(share,
                 memory.d_scores(tile) + static_cast<std::uint32_t>((warp & 1) * 16 * S::kRowBlocks * K::kWeightStride),
                 memory.keys(tile) + static_cast<std::uint32_t>((warp >> 1) * S::kColumns * C::kElementBytes));
  }
  const Step of = step_of(item, step);
  const int first = of.tile * K::kTileQ;
  const tile::KeyBlockRange seen =
      tile::key_blocks_of(item.score.band, first, min(first + K::kTileQ, item.score.rows) - 1);
  constexpr int kParts = kTileUnit / K::kTiles;
  const tile::Turn turn = tile::turn_of(seen, of.tile, K::kTileQ, item.first_tile / kTileUnit,
                                        item.first_tile / K::kTiles % kParts, kParts, params.wraps != 0);
  const Prepared& p = params.prepared;
  const std::int64_t tiles = p.head_rows / K::kTileQ;  // of a head
  const std::int64_t number = (static_cast<std::int64_t>(turn.sum) * params.work.heads.value + of.head) * tiles +
                              item.sequence.prepared_row / K::kTileQ + of.tile;
  if (threadIdx.x == 0) ptx::await_count(p.counts + number, turn.before);
  __syncthreads();  // it is this CTA's turn
  float* to = p.sums + number * K::kTileQ * C::kHeadDim + own_thread();
  const bool stores = turn.before == 0;
#pragma unroll
  for (int i = 0; i < S::kRowBlocks * C::kHeadDim / 4; ++i) {
    const float x = share[i / (C::kHeadDim / 4)][i % (C::kHeadDim / 4)];
    if (stores) {
      to[i * K::kThreads] = x;
    } else {
      ptx::add_global(to + i * K::kThreads, x);
    }
  }
  __syncthreads();  // all have added
  if (threadIdx.x == 0) ptx::count_up(p.counts + number);
}

// A warp's part of a gradient to the rows of its keys.
template <typename C>
__device__ __forceinline__ void store_keys(const BackwardParams& params, const KeyItem& item, const OutView& view,
                                           bool fp32, float scale, const KeySums<C>& sums) {
  using K = typename C::Keys;
  const int tile = own_tile<C>(), part = own_part<C>();
  const auto lane = static_cast<int>(own_lane());
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = 8 * i + (lane >> 2);  // of the tile: a key
    const int key =
        tile::key_of_column<C::kLayout, C::kTileK>(params.tiles, params.tiles.part(item.first_tile + tile), column);
    const int place = params.tiles.first_key(item.first_tile + tile) + key;
    if (key < 0 || place >= item.sequence.keys) continue;
    const std::int64_t row = view.offset(item.sequence.batch, item.kv_head, item.sequence.k_row + place);
#pragma unroll
    for (int c = 0; c < K::kColumns / 8; ++c) {
      const float* from = sums[i / 2] + 4 * c + i % 2 * 2;
      store_pair<C::kType>(view, fp32, row, part * K::kColumns + 8 * c + 2 * (lane & 3), from[0] * scale,
                           from[1] * scale);
    }
  }
}

template <typename C>
__global__ void __launch_bounds__(C::Keys::kThreads, C::Keys::kCtas)
    general_key_gradients(const __grid_constant__ BackwardParams params) {
  using K = typename C::Keys;
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 128);
  alignas(KeyItem) __shared__ std::uint8_t item_bytes[sizeof(KeyItem)];
  KeyItem& item = *reinterpret_cast<KeyItem*>(item_bytes);
  if (threadIdx.x == 0) describe_keys<C>(params, item);
  __syncthreads();  // all can read it
  const KeyMemory<C> memory{ptx::shared_address(shared)};
  const int ahead = params.key_stages - 1;  // 1: a query tile's rows come one ahead
  const int steps = params.work.heads_per_kv_head.value * item.rows.count();
  KeySums<C> d_k = {}, d_v = {};
  if (steps > 0) load_rows<C>(params, item, memory, 0, 0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int stage = step & ahead;
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();  // this step's rows are there for all, and all have left the step before
    if (ahead != 0 && step + 1 < steps) load_rows<C>(params, item, memory, step + 1, stage ^ 1);
    if (own_part<C>() < K::kRowWarps) weigh_rows<C>(params, item, memory, step, stage);
    __syncthreads();  // weights and dS are there for all
    const auto columns = static_cast<std::uint32_t>(own_part<C>() * K::kColumns * C::kElementBytes);
    add_keys<C>(d_v, memory.weights(own_tile<C>()), memory.d_out(stage) + columns);
    add_keys<C>(d_k, memory.d_scores(own_tile<C>()), memory.q(stage) + columns);
    if constexpr (K::kAddsQueries) {
      if (params.adds_queries != 0) add_queries_in_turn<C>(params, item, memory, step);
    }
    if (ahead == 0 && step + 1 < steps) {
      __syncthreads();  // all have left the stage
      load_rows<C>(params, item, memory, step + 1, 0);
    }
  }
  store_keys<C>(params, item, params.d_v, params.fp32_d_v != 0, 1.0f, d_v);
  store_keys<C>(params, item, params.d_k, params.fp32_d_k != 0, params.d_k_scale, d_k);
}

}  // namespace dspattn::cuda::general::backward
