// dK, dV and shares of dQ, by a CTA that owns key tiles and walks the query tiles that see them, of all heads that
// share the key head; dK and dV stay in registers and are written once. See docs/general_backward.md.
//
// Two or four warps share a key tile. For every query tile each first makes the weights and dS of its part of the rows,
// which go to shared memory; then each adds all rows to its part of the columns of dK and dV; then all warps share the
// product dS K, and add it to the query tile's sums when it is the CTA's turn (tile/gradient_walk.h).
#pragma once

#include <cstdint>

#include "cuda/general/backward/key_supply.h"
#include "cuda/general/backward/plain_scores.h"

namespace dspattn::cuda::general::backward {

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
    const auto store = [&](auto store_two) {
#pragma unroll
      for (int c = 0; c < K::kColumns / 8; ++c) {
        const float* from = sums[i / 2] + 4 * c + i % 2 * 2;
        store_two(first + 8 * c + 2 * (lane & 3), from[0] * scale, from[1] * scale);
      }
    };
    if (takes_pairs<C::kType>(view, fp32, to, first + K::kColumns)) {
      store([&](int column, float a, float b) { store_whole_pair<C::kType>(view, to + column, a, b); });
    } else {
      store([&](int column, float a, float b) { store_pair<C::kType>(view, fp32, to, column, a, b); });
    }
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
  walk_queries<C>(params, begin_keys<C>(params));
}

}  // namespace dspattn::cuda::general::backward
