// dK, dV and shares of dQ, by a CTA that owns key tiles and walks the query tiles that see them, of all heads that
// share the key head; dK and dV stay in registers and are written once. See docs/general_backward.md.
//
// Two or four warps share a key tile. For every query tile each first makes the weights and dS of its part of the rows,
// which go to shared memory; then each adds all rows to its part of the columns of dK and dV; then all warps share the
// product dS K, and add it to the query tile's sums when it is the CTA's turn (tile/gradient_walk.h).
#pragma once

#include <cstdint>

#include "cuda/general/backward/plain_scores.h"
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

// A step: one query tile of one head.
struct Step {
  int head, tile;
  int rows;        // of the prepared ones, the query tile
  int sum = 0;     // of the sums and counts, the one that its share of dQ is added to
  int before = 0;  // shares that come before it
  int interior;    // bit i: no row of it misses a key of the CTA's tile i
};

// Steps are described by half a warp, a step a lane: one thread would make all others wait, step by step.
inline constexpr int kStepsAtOnce = 16;

struct KeyShared {
  KeyItem item;
  Step steps[2 * kStepsAtOnce];  // in work, and the next ones
  int step_count;

  __device__ __forceinline__ const Step& step(int number) const { return steps[number % (2 * kStepsAtOnce)]; }
};
static_assert(sizeof(KeyShared) <= kDescriptionBytes);

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
  item.first_tile = (ordered ? params.key_groups - 1 - group : group) * params.key_tiles;
  item.sequence = sequence_rows(params, sequence);
  item.score = {item.sequence.rows, sequence, item.first_head, item.sequence.band};
  const int begin = params.tiles.first_key(item.first_tile);
  const int end = params.tiles.first_key(item.first_tile + params.key_tiles - 1) + params.tiles.span;
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
  int tiles;

  __device__ __forceinline__ std::uint32_t keys(int tile) const {
    return shared + static_cast<std::uint32_t>(tile * C::kKeysBytes);
  }
  __device__ __forceinline__ std::uint32_t values(int tile) const {
    return keys(tile) + static_cast<std::uint32_t>(C::kTileK * C::kStride);
  }
  __device__ __forceinline__ std::uint32_t weights(int tile) const {
    return K::kWeightsOverKeys
               ? keys(tile)
               : shared + static_cast<std::uint32_t>(tiles * C::kKeysBytes + tile * 2 * K::kWeightBytes);
  }
  // buffer: where there is dS alone, one of two
  __device__ __forceinline__ std::uint32_t d_scores(int tile, int buffer = 0) const {
    if constexpr (C::kKeyRows) return weights(tile) + static_cast<std::uint32_t>(buffer * K::kWeightBytes);
    return K::kWeightsOverKeys ? values(tile) : weights(tile) + K::kWeightBytes;
  }
  __device__ __forceinline__ std::uint32_t q(int stage) const {
    return shared + static_cast<std::uint32_t>(tiles * K::kTileBytes + stage * K::kRowsBytes);
  }
  __device__ __forceinline__ std::uint32_t d_out(int stage) const { return q(stage) + K::kTileQ * C::kStride; }
  __device__ __forceinline__ std::uint32_t numbers(int stage) const { return q(stage) + 2 * K::kTileQ * C::kStride; }
};

// Everybody of the CTA.
__device__ __forceinline__ void meet() { ptx::named_barrier_sync(1, static_cast<int>(blockDim.x)); }

// What there is to do beside the products: rows are copied, by all warps; and shares of dQ must be added in order, for
// which single ones describe steps, wait and count.
template <typename C>
struct KeySupply {
  using K = typename C::Keys;
  const BackwardParams& params;
  KeyShared& shared;
  KeyMemory<C> memory;

  __device__ __forceinline__ bool adds() const { return K::kAddsQueries && params.adds_queries != 0; }

  // What the CTA works on, and the first steps.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      describe_keys<C>(params, shared.item);
      shared.step_count = params.work.heads_per_kv_head.value * shared.item.rows.count();
    }
    __syncthreads();  // all can read it
    if (threadIdx.x < 32) describe(0);
    __syncthreads();  // and the steps
  }

  // Steps from `first` on: where their shares go, and when; by a warp.
  __device__ __forceinline__ void describe(int first) const {
    const KeyItem& item = shared.item;
    const auto lane = static_cast<int>(own_lane());
    const int number = first + lane;
    if (lane >= kStepsAtOnce || number >= shared.step_count) return;
    const int head = number / item.rows.count();
    const auto head_tiles = static_cast<int>(params.prepared.head_rows / K::kTileQ);
    Step step{item.first_head + head, tile::tile_of_step(item.rows, item.walk, number - head * item.rows.count())};
    const int in_head = static_cast<int>(item.sequence.prepared_row / K::kTileQ) + step.tile;
    step.rows = step.head * head_tiles + in_head;
    if (adds()) {
      const int row = step.tile * K::kTileQ;
      const tile::KeyBlockRange seen =
          tile::key_blocks_of(item.score.band, row, min(row + K::kTileQ, item.score.rows) - 1);
      const int parts = kTileUnit / params.key_tiles;
      const tile::Turn turn = tile::turn_of(seen, step.tile, K::kTileQ, item.first_tile / kTileUnit,
                                            item.first_tile / params.key_tiles % parts, parts, params.wraps != 0);
      step.sum = turn.sum * params.work.heads.value * head_tiles + step.rows;
      step.before = turn.before;
    }
    const int last = min((step.tile + 1) * K::kTileQ, item.score.rows) - 1;
    step.interior = 0;
    for (int i = 0; i < params.key_tiles; ++i) {
      const int first_key = params.tiles.first_key(item.first_tile + i);
      if (tile::sees_span(params.tiles, item.score.band, first_key, step.tile * K::kTileQ, last))
        step.interior |= 1 << i;
    }
    shared.steps[number % (2 * kStepsAtOnce)] = step;
  }
  // With every step, by a warp: the next ones, when those before this step's are not needed any more.
  __device__ __forceinline__ void describe_ahead(int number) const {
    if (number % kStepsAtOnce == kStepsAtOnce / 2) describe(number + kStepsAtOnce / 2);
  }

  // A step's rows, by kThreads threads of which this is number `thread`.
  template <int kThreads>
  __device__ __forceinline__ void load(int number, int thread) const {
    const Prepared& p = params.prepared;
    const int stage = number & (params.key_stages - 1);
    const std::int64_t row = static_cast<std::int64_t>(shared.step(number).rows) * K::kTileQ;
    copy_bytes<kThreads, K::kTileQ * C::kStride>(memory.q(stage), p.q + row * C::kStride, thread);
    copy_bytes<kThreads, K::kTileQ * C::kStride>(memory.d_out(stage), p.d_out + row * C::kStride, thread);
    copy_bytes<kThreads, K::kTileQ * C::kNumberBytes>(memory.numbers(stage), p.numbers + row, thread);
  }
  // K and V: with the first step, or where they are overwritten with each.
  __device__ __forceinline__ void load_keys(int thread, int threads) const {
    const KeyItem& item = shared.item;
    const Prepared& p = params.prepared;
    const std::int64_t tile = item.kv_head * p.head_tiles + item.sequence.prepared_tile + item.first_tile;
    const auto* source = p.keys + tile * C::kKeysBytes;
#pragma unroll 4
    for (int at = 16 * thread; at < params.key_tiles * C::kKeysBytes; at += 16 * threads) {
      ptx::cp_async_16(memory.keys(0) + static_cast<std::uint32_t>(at), source + at);
    }
  }

  // The share of the step before is in.
  __device__ __forceinline__ void pass_on(int number) const {
    if (adds() && number > 0) ptx::count_up(params.prepared.counts + shared.step(number - 1).sum);
  }
  // How many shares are in, asked for early: the answer takes its time.
  __device__ __forceinline__ std::int32_t ask(int number) const {
    return adds() ? ptx::count_now(params.prepared.counts + shared.step(number).sum) : 0;
  }
  __device__ __forceinline__ void await(int number, std::int32_t seen) const {
    const Step& step = shared.step(number);
    if (seen < step.before) ptx::await_count(params.prepared.counts + step.sum, step.before);
  }
};

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
__device__ __forceinline__ void weigh_rows(const BackwardParams& params, const KeyItem& item, const Step& step,
                                           const KeyMemory<C>& memory, int stage) {
  using K = typename C::Keys;
  const int tile = own_tile<C>();
  const int own = own_part<C>() * 16 * K::kRowBlocks;  // of the query tile
  const int first = step.tile * K::kTileQ;
  const int first_key = params.tiles.first_key(item.first_tile + tile);
  const auto rows = [own](int bytes) { return static_cast<std::uint32_t>(own * bytes); };
  const TilePlace place{memory.q(stage) + rows(C::kStride),
                        memory.d_out(stage) + rows(C::kStride),
                        memory.numbers(stage) + rows(C::kNumberBytes),
                        memory.keys(tile),
                        memory.values(tile),
                        first + own,
                        first_key,
                        params.tiles.part(item.first_tile + tile),
                        (step.interior >> tile & 1) != 0};
  const ScoreItem whose{item.score.rows, item.score.sequence, step.head, item.score.band};
  const auto at = [&](int block) {
    return rows(K::kWeightStride) + static_cast<std::uint32_t>(16 * block * K::kWeightStride);
  };
  Block<C> weights[K::kRowBlocks], d_scores[K::kRowBlocks];
  const auto take_weights = [&](int block, const Block<C>& left) {
    if constexpr (K::kWeightsOverKeys) __syncwarp();  // all lanes have read K, whose place is written now
    store_weights<C>(memory.weights(tile) + at(block), left);
  };
  if constexpr (C::kPlain) {
    make_plain_weights<C>(params, whose, place, weights, d_scores, take_weights);
  } else {
    make_weights<C>(params, whose, place, weights, d_scores, take_weights);
  }
  if constexpr (K::kWeightsOverKeys) __syncwarp();  // and V
#pragma unroll
  for (int i = 0; i < K::kRowBlocks; ++i) store_weights<C>(memory.d_scores(tile) + at(i), d_scores[i]);
}

// A chunk of a share to the sums, of which `to` is the lane's first; the first share of all is stored.
template <typename C>
__device__ __forceinline__ void add_to_sums(float* to, bool is_first, const ShareSums<C>& share) {
  using S = typename C::Share;
  const auto element = [&](int i) {
    return share[i / (S::kElements / S::kRowBlocks)][i % (S::kElements / S::kRowBlocks)];
  };
  if (is_first) {
#pragma unroll
    for (int i = 0; i < S::kElements; ++i) to[i * 32] = element(i);
  } else {
#pragma unroll
    for (int i = 0; i < S::kElements; ++i) ptx::add_global(to + i * 32, element(i));
  }
}

// This warp's chunks of the CTA's share of a query tile's dQ.
template <typename C>
__device__ __forceinline__ void add_queries_in_turn(const BackwardParams& params, const Step& step,
                                                    const KeyMemory<C>& memory, int buffer = 0) {
  using K = typename C::Keys;
  using S = typename C::Share;
  const int warp = own_thread() >> 5, half = warp & 1;
#pragma unroll 1
  for (int quarter = warp >> 1; quarter < 4; quarter += memory.tiles * K::kSplit / 2) {
    ShareSums<C> share = {};
    const auto add = [&](int tile) {
      const int rows = half * S::kRows * (C::kKeyRows ? C::kElementBytes : K::kWeightStride);
      add_share<C>(share, memory.d_scores(tile, buffer) + static_cast<std::uint32_t>(rows),
                   memory.keys(tile) + static_cast<std::uint32_t>(quarter * S::kColumns * C::kElementBytes));
    };
    if (C::kPlain && memory.tiles == K::kMaxTiles) {
#pragma unroll
      for (int tile = 0; tile < K::kMaxTiles; ++tile) add(tile);
    } else {
      constexpr int kAtOnce = K::kMaxTiles > 1 ? 2 : 1;  // a CTA has an even number of tiles, or one
#pragma unroll 1
      for (int tile = 0; tile < memory.tiles; tile += kAtOnce) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) add(tile + i);
      }
    }
    float* to = params.prepared.sums + static_cast<std::int64_t>(step.sum) * (K::kTileQ * C::kHeadDim) +
                (half * 4 + quarter) * 32 * S::kElements + own_lane();
    add_to_sums<C>(to, step.before == 0, share);
  }
}

// A warp's part of a gradient, columns from `first` on, to the rows of its keys.
template <typename C>
__device__ __forceinline__ void store_keys(const BackwardParams& params, const KeyItem& item, const OutView& view,
                                           bool fp32, float scale, const KeySums<C>& sums, int first) {
  using K = typename C::Keys;
  const int tile = own_tile<C>();
  const auto lane = static_cast<int>(own_lane());
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 8 * i + (lane >> 2);  // of the tile: a key
    const int column = C::kKeyRows ? tile::column_of_key_row(row) : row;
    const int key =
        tile::key_of_column<C::kLayout, C::kTileK>(params.tiles, params.tiles.part(item.first_tile + tile), column);
    const int place = params.tiles.first_key(item.first_tile + tile) + key;
    if (key < 0 || place >= item.sequence.keys) continue;
    const std::int64_t to = view.offset(item.sequence.batch, item.kv_head, item.sequence.k_row + place);
#pragma unroll
    for (int c = 0; c < K::kColumns / 8; ++c) {
      const float* from = sums[i / 2] + 4 * c + i % 2 * 2;
      store_pair<C::kType>(view, fp32, to, first + 8 * c + 2 * (lane & 3), from[0] * scale, from[1] * scale);
    }
  }
}

// A step's rows, by all threads; with the first one K and V, or with each where they are overwritten.
template <typename C>
__device__ __forceinline__ void load_step(const KeySupply<C>& supply, int number) {
  using K = typename C::Keys;
  if (number == 0 || K::kWeightsOverKeys) supply.load_keys(own_thread(), static_cast<int>(blockDim.x));
  if (K::kMaxTiles < 4 || supply.memory.tiles == K::kMaxTiles) {
    supply.template load<K::kMaxThreads>(number, own_thread());
  } else {
    supply.template load<K::kMaxThreads / 2>(number, own_thread());
  }
}

template <typename C>
__device__ __forceinline__ void walk_queries(const BackwardParams& params, const KeySupply<C>& supply) {
  using K = typename C::Keys;
  const KeyMemory<C>& memory = supply.memory;
  const KeyShared& shared = supply.shared;
  const int ahead = params.key_stages - 1, steps = shared.step_count;
  KeySums<C> d_k = {}, d_v = {};
  if (steps > 0) load_step<C>(supply, 0);
#pragma unroll 1
  for (int number = 0; number < steps; ++number) {
    const int stage = number & ahead;
    const Step& step = shared.step(number);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    meet();  // this step's rows are there for all, and all have left the step before
    std::int32_t seen = 0;
    if (own_thread() == 32) seen = supply.ask(number);
    if (ahead != 0 && number + 1 < steps) load_step<C>(supply, number + 1);
    if (own_part<C>() < K::kRowWarps) weigh_rows<C>(params, shared.item, step, memory, stage);
    if (own_thread() == 0) supply.pass_on(number);
    if (own_thread() == 32) supply.await(number, seen);
    if (own_thread() >= 32 && own_thread() < 64) supply.describe_ahead(number);
    meet();  // weights and dS are there for all, and it is this CTA's turn
    const auto columns = static_cast<std::uint32_t>(own_part<C>() * K::kColumns * C::kElementBytes);
    add_keys<C>(d_v, memory.weights(own_tile<C>()), memory.d_out(stage) + columns);
    add_keys<C>(d_k, memory.d_scores(own_tile<C>()), memory.q(stage) + columns);
    if constexpr (K::kAddsQueries) {
      if (params.adds_queries != 0) add_queries_in_turn<C>(params, step, memory);
    }
    if (ahead == 0) {
      meet();  // all have left the stage
      if (number + 1 < steps) load_step<C>(supply, number + 1);
    }
  }
  if (steps > 0) meet();  // all have added
  if (own_thread() == 0) supply.pass_on(steps);
  const int first = own_part<C>() * K::kColumns;
  store_keys<C>(params, shared.item, params.d_v, params.fp32_d_v != 0, 1.0f, d_v, first);
  store_keys<C>(params, shared.item, params.d_k, params.fp32_d_k != 0, params.d_k_scale, d_k, first);
}

template <typename C>
__global__ void __launch_bounds__(C::Keys::kMaxThreads, C::Keys::kCtas)
    general_key_gradients(const __grid_constant__ BackwardParams params) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, bytes, 128);
  alignas(KeyShared) __shared__ std::uint8_t item_bytes[sizeof(KeyShared)];
  KeyShared& shared = *reinterpret_cast<KeyShared*>(item_bytes);
  const KeySupply<C> supply{params, shared, {ptx::shared_address(bytes), params.key_tiles}};
  supply.begin();
  walk_queries<C>(params, supply);
}

}  // namespace dspattn::cuda::general::backward
