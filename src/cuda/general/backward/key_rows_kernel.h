// dK, dV and shares of dQ as in key_kernel.h, with keys as the rows of scores: small head dims, Features::plain.
//
// Two warps share a key tile; each has half of a query tile's rows, and dK and dV of all columns from them. Its weights
// and dS leave the exponentials as operands of the products that contract over queries, in registers; dS alone goes to
// shared memory, for dQ. So a step has one barrier: dS has two buffers, and rows come a step ahead.
//
//   scores, weights, dP, dS of a step; dV, dK | barrier | dQ; the rows after the next one are asked for
//
// Which operand of a product is the left one does not change a bit of it (docs/general_backward.md).
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/general/backward/key_kernel.h"
#include "cuda/tile/key_row_lanes.h"
#include "cuda/tile/key_rows.h"

namespace dspattn::cuda::general::backward {

// Of a warp: 32 keys x 32 query rows. Of keys 16m + g and 16m + g + 8 and query rows 8c + 2t and 8c + 2t + 1 of the
// warp's: block[m][4c ...], that key first.
using KeyRowScores = float[2][16];

// What a lane of ldmatrix addresses, of rows C::kStride apart: `along`, 16 rows of left operands, or of right ones read
// transposed; `across`, the other way round.
template <typename C>
struct LanePlaces {
  std::uint32_t along, across;

  __device__ __forceinline__ LanePlaces() {
    const std::uint32_t lane = threadIdx.x & 31;
    along = (lane & 15) * C::kStride + (lane >> 4) * 16;
    across = ((lane >> 4) * 8 + (lane & 7)) * C::kStride + (lane >> 3 & 1) * 16;
  }
};

// acc = keys * rows^T, 16 columns a step as the forward. key: along; row: across.
template <typename C>
__device__ __forceinline__ void multiply_keys(KeyRowScores& acc, std::uint32_t key, std::uint32_t row) {
  using Element = ElementOf<C::kType>;
#pragma unroll
  for (int i = 0; i < 32; ++i) acc[i / 16][i % 16] = 0;
#pragma unroll
  for (std::uint32_t at = 0; at < C::kRowBytes; at += 32) {
    std::uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) ptx::ldmatrix_x4(a[m], key + m * 16 * C::kStride + at);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      std::uint32_t b[4];
      ptx::ldmatrix_x4(b, row + pair * 16 * C::kStride + at);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::mma_32_bytes<Element>(four(acc[m] + 8 * pair), a[m], b[0], b[1]);
        ptx::mma_32_bytes<Element>(four(acc[m] + 8 * pair + 4), a[m], b[2], b[3]);
      }
    }
  }
}

// Two neighbouring query rows of a key, packed: of row block c, key m and half h as above, word 4c + 2m + h.
using KeyRowWords = std::uint32_t[16];

template <typename C>
__device__ __forceinline__ void pack_rows(const KeyRowScores& values, KeyRowWords& words) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float* pair = values[i / 2 % 2] + i / 4 * 4 + i % 2 * 2;
    words[i] = pack<C>(pair[0], pair[1]);
  }
}

// sums += words * rows: the warp's 32 query rows of dO or Q. row: along.
template <typename C>
__device__ __forceinline__ void add_key_rows(KeySums<C>& sums, const KeyRowWords& words, std::uint32_t row) {
  using Element = ElementOf<C::kType>;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    std::uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = words[8 * step + i % 4 / 2 * 4 + i / 4 * 2 + i % 2];
#pragma unroll
    for (int columns = 0; columns < C::kHeadDim / 8; columns += 2) {
      std::uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, row + step * 16 * C::kStride + columns * 16);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::mma_32_bytes<Element>(four(sums[m] + 4 * columns), a[m], b[0], b[1]);
        ptx::mma_32_bytes<Element>(four(sums[m] + 4 * columns + 4), a[m], b[2], b[3]);
      }
    }
  }
}

// What a warp's tile is, where keys are rows.
struct KeyRowPlace {
  int first_row;  // the warp's, of the sequence
  int first_key, part;
  bool interior;
};

// What no query row of the warp's may see is -inf.
template <typename C>
__device__ __forceinline__ void mask_key_rows(const BackwardParams& params, const tile::RowBand& band,
                                              const KeyRowPlace& place, KeyRowScores& scores) {
  const auto lane = static_cast<int>(own_lane());
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = tile::key_of_column<C::kLayout, C::kTileK>(params.tiles, place.part,
                                                               tile::column_of_key_row(8 * i + (lane >> 2)));
    const tile::QueryInterval seen = tile::queries_of_key(band, place.first_key + key, place.first_row);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int row = e / 2 * 8 + 2 * (lane & 3) + e % 2;
      if (key < 0 || !seen.holds(row)) scores[i / 2][e / 2 * 4 + i % 2 * 2 + e % 2] = -INFINITY;
    }
  }
}

// A word of another lane that has places of the same groups: those of lanes t and t ^ x of eight.
struct KeyRowExchange {
  __device__ __forceinline__ static int own() {
    return tile::number_of_key_row_lane(static_cast<int>(own_lane() >> 2));
  }
  __device__ __forceinline__ std::uint32_t operator()(std::uint32_t word, int x) const {
    return __shfl_xor_sync(~0u, word, 4 * tile::key_row_lane_of_number(x));
  }
};

// Scores become weights, as weigh_plain() does it. lse: of query rows 8c + 2t and 8c + 2t + 1, at 2c.
template <typename C>
__device__ __forceinline__ void weigh_key_rows(const BackwardParams& params, const tile::RowBand& band,
                                               const KeyRowPlace& place, const float (&lse)[8], KeyRowScores& scores) {
  if (!place.interior) mask_key_rows<C>(params, band, place, scores);
  PackedChoice<4> choice;
#pragma unroll
  for (int i = 0; i < choice.kWords; ++i) {
    const float* pair = scores[i / 2 % 2] + i / 4 * 4 + i % 2 * 2;
    choice.put(i, pair[0], pair[1]);
  }
  choice.choose(params, KeyRowExchange{});
  bool defined = true;
  if (!place.interior) {
    choice.drop_masked();
#pragma unroll
    for (const float x : lse) defined = defined && !std::isnan(x);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float* pair = scores[i / 2 % 2] + i / 4 * 4 + i % 2 * 2;
    choice.get(i, pair[0], pair[1]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      pair[e] = ptx::exp2_fast(fmaf(pair[e], params.scales.exp2_scale, -lse[i / 4 * 2 + e]));
    }
  }
  if (__all_sync(~0u, defined)) return;
  mask_key_rows<C>(params, band, place, scores);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    float& weight = scores[i / 16][i % 16];
    weight = weight == -INFINITY ? 0.0f : weight;
  }
}

// A warp's addresses in shared memory, of the first stage and buffer: computed once, which leaves the loop to products.
template <typename C>
struct KeyRowWarp {
  using K = typename C::Keys;
  using S = typename C::Share;
  static_assert(K::kWeightStride == C::kStride);  // so that dS is read as rows of Q are

  int tile, own;                         // its key tile; its first row of a query tile
  std::uint32_t key;                     // K of its tile, along; V follows
  std::uint32_t row, row_transposed;     // Q of its rows, across and along; dO follows
  std::uint32_t numbers, d_scores;       // as its lanes read and write them
  std::uint32_t share_rows, share_keys;  // of dS and K, of its chunk of dQ
  float* sums;                           // of its chunk, of the first query tile

  __device__ __forceinline__ KeyRowWarp(const BackwardParams& params, const KeyMemory<C>& memory) {
    const LanePlaces<C> lanes;
    const auto thread = static_cast<int>(threadIdx.x);
    const int warp = thread >> 5, lane = thread & 31, chunk = (warp & 1) * 4 + (warp >> 1);
    const auto bytes = [](int x) { return static_cast<std::uint32_t>(x); };
    tile = warp / K::kSplit;
    own = warp % K::kSplit * 32;
    key = memory.keys(tile) + lanes.along;
    row = memory.q(0) + bytes(own * C::kStride) + lanes.across;
    row_transposed = memory.q(0) + bytes(own * C::kStride) + lanes.along;
    numbers = memory.numbers(0) + bytes((own + 2 * (lane & 3)) * C::kNumberBytes);
    d_scores = memory.d_scores(tile) + bytes((lane >> 2) * K::kWeightStride + 2 * own + 4 * (lane & 3));
    share_rows = memory.d_scores(0) + bytes((warp & 1) * S::kRows * C::kElementBytes) + lanes.across;
    share_keys = memory.keys(0) + bytes((warp >> 1) * S::kColumns * C::kElementBytes) + lanes.along;
    sums = params.prepared.sums + chunk * 32 * S::kElements + lane;
  }
};

// A step but for dQ.
template <typename C>
__device__ __forceinline__ void add_step(const BackwardParams& params, const KeyItem& item, const Step& step,
                                         const KeyRowWarp<C>& warp, std::uint32_t stage, std::uint32_t buffer,
                                         KeySums<C>& d_k, KeySums<C>& d_v) {
  using K = typename C::Keys;
  constexpr std::uint32_t kToValues = C::kTileK * C::kStride, kToDOut = K::kTileQ * C::kStride;
  const KeyRowPlace place{step.tile * K::kTileQ + warp.own, params.tiles.first_key(item.first_tile + warp.tile),
                          params.tiles.part(item.first_tile + warp.tile), (step.interior >> warp.tile & 1) != 0};
  KeyRowScores weights, d_scores;
  multiply_keys<C>(weights, warp.key, warp.row + stage);
  multiply_keys<C>(d_scores, warp.key + kToValues, warp.row + stage + kToDOut);
  float lse[8], d[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    std::uint32_t pair[2];
    ptx::load_shared_bytes<8>(warp.numbers + stage + (i / 2 * 8 + i % 2) * C::kNumberBytes, pair);
    lse[i] = __uint_as_float(pair[0]);
    d[i] = __uint_as_float(pair[1]);
  }
  weigh_key_rows<C>(params, item.score.band, place, lse, weights);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    float& x = d_scores[i / 16][i % 16];
    x = weights[i / 16][i % 16] * (x - d[i % 16 / 4 * 2 + i % 2]);
  }
  KeyRowWords words;
  pack_rows<C>(d_scores, words);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    ptx::store_shared(warp.d_scores + buffer + i % 4 * 8 * K::kWeightStride + i / 4 * 16, words[i]);
  }
  add_key_rows<C>(d_k, words, warp.row_transposed + stage);
  pack_rows<C>(weights, words);
  add_key_rows<C>(d_v, words, warp.row_transposed + stage + kToDOut);
}

// The warp's chunk of the share of a CTA of kMaxTiles key tiles.
template <typename C>
__device__ __forceinline__ void add_chunk(const Step& step, const KeyRowWarp<C>& warp, std::uint32_t buffer) {
  using K = typename C::Keys;
  ShareSums<C> share = {};
#pragma unroll
  for (int i = 0; i < K::kMaxTiles; ++i) {
    add_share_of_lanes<C>(share, warp.share_rows + buffer + i * 2 * K::kWeightBytes,
                          warp.share_keys + i * C::kKeysBytes);
  }
  add_to_sums<C>(warp.sums + static_cast<std::int64_t>(step.sum) * (K::kTileQ * C::kHeadDim), step.before == 0, share);
}

// Both warps of a key tile have sums of it: one adds up and stores dV, the other dK. Each gives the other its part.
template <typename C>
struct KeyRowExit {
  static constexpr int kElements = C::kHeadDim;  // of a lane
  std::uint32_t shared;                          // all have left it

  __device__ __forceinline__ static bool has_values() { return own_part<C>() == 0; }
  __device__ __forceinline__ std::uint32_t place(int warp) const {
    return shared + static_cast<std::uint32_t>(warp * 32 * kElements * 4) + 4 * own_lane();
  }
  __device__ __forceinline__ static float& element(KeySums<C>& sums, int i) {
    return sums[i * 2 / kElements][i % (kElements / 2)];
  }
  __device__ __forceinline__ void give(KeySums<C>& d_k, KeySums<C>& d_v) const {
    const std::uint32_t to = place(own_thread() >> 5);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      ptx::store_shared(to + 128 * i, __float_as_uint(has_values() ? element(d_k, i) : element(d_v, i)));
    }
  }
  __device__ __forceinline__ void store(const BackwardParams& params, const KeyItem& item, KeySums<C>& d_k,
                                        KeySums<C>& d_v) const {
    const std::uint32_t from = place(own_thread() >> 5 ^ 1);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float other = __uint_as_float(ptx::load_shared(from + 128 * i));
      element(d_k, i) = has_values() ? element(d_v, i) + other : other + element(d_k, i);
    }
    store_keys<C>(params, item, has_values() ? params.d_v : params.d_k,
                  (has_values() ? params.fp32_d_v : params.fp32_d_k) != 0, has_values() ? 1.0f : params.d_k_scale, d_k,
                  0);
  }
};

template <typename C>
__device__ __forceinline__ void walk_key_rows(const BackwardParams& params, const KeySupply<C>& supply) {
  using K = typename C::Keys;
  const KeyShared& shared = supply.shared;
  const int steps = shared.step_count;
  const KeyRowWarp<C> warp(params, supply.memory);
  const auto load = [&](int number) {  // every step has a group of copies, if an empty one
    if (number < steps) load_step<C>(supply, number);
    ptx::cp_async_commit();
  };
  KeySums<C> d_k = {}, d_v = {};
  load(0);
  load(1);
  ptx::cp_async_wait<1>();
  meet();  // the first step's rows, K and V are there for all
#pragma unroll 1
  for (int number = 0; number < steps; ++number) {
    const Step& step = shared.step(number);
    const auto odd = static_cast<std::uint32_t>(number & 1);
    std::int32_t seen = 0;
    if (own_thread() < 64) {  // two warps
      if (own_thread() == 0 && number > 0) supply.pass_on(number - 1);
      if (own_thread() == 32) seen = supply.ask(number);
    }
    add_step<C>(params, shared.item, step, warp, odd * K::kRowsBytes, odd * K::kWeightBytes, d_k, d_v);
    if (own_thread() >= 32 && own_thread() < 64) {
      if (own_thread() == 32) supply.await(number, seen);
      supply.describe_ahead(number);
    }
    ptx::cp_async_wait<0>();
    meet();  // dS and the next step's rows are there for all, this step's rows are free, and it is this CTA's turn
    load(number + 2);
    if (supply.memory.tiles == K::kMaxTiles) {
      add_chunk<C>(step, warp, odd * K::kWeightBytes);
    } else {  // four warps: two chunks each
      add_queries_in_turn<C>(params, step, supply.memory, static_cast<int>(odd));
    }
  }
  meet();  // all have added, and left shared memory
  const KeyRowExit<C> exit{supply.memory.keys(0)};
  exit.give(d_k, d_v);
  meet();  // the other's part is there
  // Two warps say that the last two shares are in, while the others store.
  if (own_thread() == 0 && steps > 0) supply.pass_on(steps - 1);
  if (own_thread() == 32 && steps > 0) supply.pass_on(steps);
  exit.store(params, shared.item, d_k, d_v);
}

template <typename C>
__global__ void __launch_bounds__(C::Keys::kMaxThreads, C::Keys::kCtas)
    general_key_row_gradients(const __grid_constant__ BackwardParams params) {
  walk_key_rows<C>(params, begin_keys<C>(params));
}

}  // namespace dspattn::cuda::general::backward
