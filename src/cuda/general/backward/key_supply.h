// What a CTA of the key-stationary kernels works on, step by step, and how it gets there: which query tiles, whose turn
// it is to add to their dQ, copies of rows and keys to shared memory. See docs/general_backward.md.
#pragma once

#include <cstdint>

#include "cuda/general/backward/chunk.h"
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
  bool ascends;          // from the last of them back; shares are added from the first key tile up
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
  const tile::GradientItem taken = params.items.item(index);
  const int sequence = taken.sequence_head / params.kv_heads;
  item.kv_head = taken.sequence_head - sequence * params.kv_heads;
  item.first_head = item.kv_head * params.work.heads_per_kv_head.value;
  item.first_tile = taken.key_tile * params.key_tiles;
  item.ascends = taken.ascends;
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
    const int in_walk = number - head * item.rows.count();
    Step step{item.first_head + head,
              item.ascends ? item.rows.end - 1 - in_walk : tile::tile_of_step(item.rows, item.walk, in_walk)};
    const int in_head = static_cast<int>(item.sequence.prepared_row / K::kTileQ) + step.tile;
    step.rows = step.head * head_tiles + in_head;
    if (adds()) {
      const int row = step.tile * K::kTileQ;
      const tile::KeyBlockRange seen =
          tile::key_blocks_of(item.score.band, row, min(row + K::kTileQ, item.score.rows) - 1);
      const int parts = kTileUnit / params.key_tiles;
      const int block = item.first_tile / kTileUnit, part = item.first_tile / params.key_tiles % parts;
      const tile::Turn turn = item.ascends
                                  ? tile::ascending_turn_of(seen, block, part, parts)
                                  : tile::turn_of(seen, step.tile, K::kTileQ, block, part, parts, params.wraps != 0);
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
    if (!K::kWeightsOverKeys && params.loads_keys != 0) return take_keys(thread, threads);
    const KeyItem& item = shared.item;
    const Prepared& p = params.prepared;
    const std::int64_t tile = item.kv_head * p.head_tiles + item.sequence.prepared_tile + item.first_tile;
    const auto* source = p.keys + tile * C::kKeysBytes;
#pragma unroll 4
    for (int at = 16 * thread; at < params.key_tiles * C::kKeysBytes; at += 16 * threads) {
      ptx::cp_async_16(memory.keys(0) + static_cast<std::uint32_t>(at), source + at);
    }
  }
  // From the inputs: the chunks that a thread has on their way at once are those of kAtOnce rows of K and of V.
  __device__ __forceinline__ void take_keys(int thread, int threads) const {
    constexpr int kChunks = C::kRowBytes / 16, kAtOnce = 4;
    const KeyItem& item = shared.item;
    const int chunk = thread % kChunks, step = threads / kChunks;
    const auto load = [&](const RowsView& view, int key, int columns) {
      const bool present = key >= 0 && chunk * (16 / C::kElementBytes) < columns;
      const auto* row = static_cast<const std::uint8_t*>(view.data) +
                        view.offset(item.sequence.batch, item.kv_head, item.sequence.k_row + key) * C::kElementBytes;
      return present ? *reinterpret_cast<const uint4*>(row + 16 * chunk) : uint4{};
    };
#pragma unroll 1
    for (int first = thread / kChunks; first < params.key_tiles * C::kTileK; first += kAtOnce * step) {
      uint4 k[kAtOnce], v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = (first + i * step) % C::kTileK;
        const int key =
            key_of_tile_column(params.tiles, item.score.band, item.first_tile + (first + i * step) / C::kTileK,
                               C::kKeyRows ? tile::column_of_key_row(row) : row);
        k[i] = load(params.k, key, params.d);
        v[i] = load(params.v, key, params.value_d);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * step;
        if (row >= params.key_tiles * C::kTileK) break;
        const std::uint32_t to =
            memory.keys(row / C::kTileK) + static_cast<std::uint32_t>(row % C::kTileK * C::kStride + 16 * chunk);
        put(to, k[i], [](Chunk<C::kType>& of_k) { of_k.clean_keys(); });
        put(to + C::kTileK * C::kStride, v[i], [](Chunk<C::kType>& of_v) { of_v.clean_values(); });
      }
    }
  }
  // 16 bytes of the inputs to shared memory. Nearly all are finite, and 16-bit ones then stay as they are.
  template <typename Clean>
  __device__ __forceinline__ static void put(std::uint32_t to, uint4 x, Clean clean) {
    if (C::kIsFp32 || !all_finite<C::kType>(x)) {
      Chunk<C::kType> chunk(x);
      clean(chunk);
      x = chunk.prepared(C::kIsTf32, kOnePair<C::kType>);
    }
    ptx::store_shared_16(to, x.x, x.y, x.z, x.w);
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

// A step's rows; with the first one K and V, or with each where they are overwritten. By all threads; but where the
// first warp would keep all others waiting when it says that a share is in, the others copy the rows.
template <typename C>
__device__ __forceinline__ void load_step(const KeySupply<C>& supply, int number) {
  using K = typename C::Keys;
  constexpr int kSpared = C::kPlain && !C::kKeyRows ? 32 : 0;
  if (own_thread() >= kSpared) {
    if (K::kMaxTiles < 4 || supply.memory.tiles == K::kMaxTiles) {
      supply.template load<K::kMaxThreads - kSpared>(number, own_thread() - kSpared);
    } else {
      supply.template load<K::kMaxThreads / 2 - kSpared>(number, own_thread() - kSpared);
    }
  }
  if (number == 0 || K::kWeightsOverKeys) supply.load_keys(own_thread(), static_cast<int>(blockDim.x));
}

// What a CTA begins with.
template <typename C>
__device__ __forceinline__ KeySupply<C> begin_keys(const BackwardParams& params) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, bytes, 128);
  alignas(KeyShared) __shared__ std::uint8_t item_bytes[sizeof(KeyShared)];
  KeyShared& shared = *reinterpret_cast<KeyShared*>(item_bytes);
  const KeySupply<C> supply{params, shared, {ptx::shared_address(bytes), params.key_tiles}};
  supply.begin();
  return supply;
}

}  // namespace dspattn::cuda::general::backward
