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

namespace dspattn::cuda::general::backward {

// What a CTA works on. It waits in shared memory until it is needed: registers are short.
struct KeyItem {
  SequenceRows sequence;
  ScoreItem score;       // its head is that of the step
  int first_tile;        // of the sequence's key tiles
  tile::TileRange rows;  // query tiles
  int first_head, kv_head;
};

template <typename C>
__device__ __forceinline__ void describe_keys(const BackwardParams& params, KeyItem& item) {
  const int index = static_cast<int>(blockIdx.x);
  const int sequence_head = index / params.key_groups;
  const int sequence = sequence_head / params.kv_heads;
  item.kv_head = sequence_head - sequence * params.kv_heads;
  item.first_head = item.kv_head * params.work.heads_per_kv_head.value;
  item.first_tile = (index - sequence_head * params.key_groups) * C::Keys::kTiles;
  item.sequence = sequence_rows(params, sequence);
  item.score = {item.sequence.rows, sequence, item.first_head, item.sequence.band};
  const int begin = params.tiles.first_key(item.first_tile);
  const int end = params.tiles.first_key(item.first_tile + C::Keys::kTiles - 1) + params.tiles.span;
  item.rows = tile::row_tiles_that_see(item.sequence.band, item.sequence.rows, begin, end, C::Keys::kTileQ);
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
  const int count = item.rows.end - item.rows.begin;
  const int head = step / count;
  return {item.first_head + head, item.rows.begin + step - head * count};
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
  const int steps = params.work.heads_per_kv_head.value * (item.rows.end - item.rows.begin);
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
    if constexpr (K::kSplit == 1) {
      __syncwarp();  // all lanes' weights are there
    } else {
      ptx::named_barrier_sync(1 + own_tile<C>(), 32 * K::kSplit);  // the key tile's weights are there for its warps
    }
    const auto columns = static_cast<std::uint32_t>(own_part<C>() * K::kColumns * C::kElementBytes);
    add_keys<C>(d_v, memory.weights(own_tile<C>()), memory.d_out(stage) + columns);
    add_keys<C>(d_k, memory.d_scores(own_tile<C>()), memory.q(stage) + columns);
    if (ahead == 0 && step + 1 < steps) {
      __syncthreads();  // all have left the stage
      load_rows<C>(params, item, memory, step + 1, 0);
    }
  }
  store_keys<C>(params, item, params.d_v, params.fp32_d_v != 0, 1.0f, d_v);
  store_keys<C>(params, item, params.d_k, params.fp32_d_k != 0, params.d_k_scale, d_k);
}

}  // namespace dspattn::cuda::general::backward
