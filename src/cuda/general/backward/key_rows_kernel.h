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
#include "cuda/tile/key_rows.h"

namespace dspattn::cuda::general::backward {

// Of a warp: 32 keys x 32 query rows. Of keys 16m + g and 16m + g + 8 and query rows 8c + 2t and 8c + 2t + 1 of the
// warp's: block[m][4c ...], that key first.
using KeyRowScores = float[2][16];

// acc = keys * rows^T, 16 columns a step as the forward.
template <typename C>
__device__ __forceinline__ void multiply_keys(KeyRowScores& acc, std::uint32_t keys, std::uint32_t rows) {
  using Element = ElementOf<C::kType>;
#pragma unroll
  for (int i = 0; i < 32; ++i) acc[i / 16][i % 16] = 0;
  const std::uint32_t lane = own_lane();
  const std::uint32_t key = keys + (lane & 15) * C::kStride + (lane >> 4) * 16;
  const std::uint32_t row = rows + ((lane >> 4) * 8 + (lane & 7)) * C::kStride + (lane >> 3 & 1) * 16;
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

// sums += words * rows: the warp's 32 query rows of dO or Q from `rows` on.
template <typename C>
__device__ __forceinline__ void add_key_rows(KeySums<C>& sums, const KeyRowWords& words, std::uint32_t rows) {
  using Element = ElementOf<C::kType>;
  const std::uint32_t row = rows + (own_lane() & 15) * C::kStride + (own_lane() >> 4) * 16;
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

// Scores become weights, as weigh_plain() does it. lse: of query rows 8c + 2t and 8c + 2t + 1, at 2c.
template <typename C>
__device__ __forceinline__ void weigh_key_rows(const BackwardParams& params, const tile::RowBand& band,
                                               const KeyRowPlace& place, const float (&lse)[8], KeyRowScores& scores) {
  if (!place.interior) mask_key_rows<C>(params, band, place, scores);
  KeyRowWords words, kept;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float* pair = scores[i / 2 % 2] + i / 4 * 4 + i % 2 * 2;
    words[i] = ptx::pack_f16x2_clamped(pair[0], pair[1]);
    kept[i] = ~0u;
  }
  const auto choose = [&](auto keep) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const tile::KeptElements elements = tile::kept_elements(keep(words[i], words[i + 1], words[i + 2], words[i + 3]));
#pragma unroll
      for (int e = 0; e < 4; ++e) kept[i + e] = elements.mask[e];
    }
  };
  if (params.keep != 0) {
    if (params.tiles.places_log2 == 2) {
      choose([](auto... four) { return tile::keep_two_of_four(four...); });
    } else {
      choose([](auto... four) { return tile::keep_one_of_two(four...); });
    }
  }
  bool defined = true;
  if (!place.interior) {
#pragma unroll
    for (int i = 0; i < 16; ++i) kept[i] &= ~ptx::equal_f16x2(words[i], blocks::kLowestPair);
#pragma unroll
    for (const float x : lse) defined = defined && !std::isnan(x);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float* pair = scores[i / 2 % 2] + i / 4 * 4 + i % 2 * 2;
    ptx::unpack_f16x2(ptx::bit_select(kept[i], words[i], kNoScores), pair[0], pair[1]);
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

// dS to shared memory, [key][query row], `rows` at the warp's first query row.
template <typename C>
__device__ __forceinline__ void store_d_scores(std::uint32_t rows, const KeyRowWords& words) {
  const std::uint32_t own = rows + (own_lane() >> 2) * C::Keys::kWeightStride + 4 * (own_lane() & 3);
#pragma unroll
  for (int i = 0; i < 16; ++i) ptx::store_shared(own + i % 4 * 8 * C::Keys::kWeightStride + i / 4 * 16, words[i]);
}

// A step but for dQ.
template <typename C>
__device__ __forceinline__ void add_step(const BackwardParams& params, const KeyItem& item, const Step& step,
                                         const KeyMemory<C>& memory, int number, KeySums<C>& d_k, KeySums<C>& d_v) {
  using K = typename C::Keys;
  const int tile = own_tile<C>(), stage = number & 1;
  const int own = own_part<C>() * 32;  // of the query tile
  const int first = step.tile * K::kTileQ;
  const int first_key = params.tiles.first_key(item.first_tile + tile);
  const KeyRowPlace place{
      first + own, first_key, params.tiles.part(item.first_tile + tile),
      tile::sees_span(params.tiles, item.score.band, first_key, first, min(first + K::kTileQ, item.score.rows) - 1)};
  const auto rows = [own](int bytes) { return static_cast<std::uint32_t>(own * bytes); };
  const std::uint32_t q = memory.q(stage) + rows(C::kStride), d_out = memory.d_out(stage) + rows(C::kStride);
  float lse[8], d[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    std::uint32_t pair[2];
    const auto row = static_cast<std::uint32_t>(i / 2 * 8 + i % 2) + 2 * (own_lane() & 3);
    ptx::load_shared_bytes<8>(memory.numbers(stage) + rows(C::kNumberBytes) + row * C::kNumberBytes, pair);
    lse[i] = __uint_as_float(pair[0]);
    d[i] = __uint_as_float(pair[1]);
  }
  KeyRowScores weights, d_scores;
  KeyRowWords words;
  multiply_keys<C>(weights, memory.keys(tile), q);
  multiply_keys<C>(d_scores, memory.values(tile), d_out);
  weigh_key_rows<C>(params, item.score.band, place, lse, weights);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    float& x = d_scores[i / 16][i % 16];
    x = weights[i / 16][i % 16] * (x - d[i % 16 / 4 * 2 + i % 2]);
  }
  pack_rows<C>(weights, words);
  add_key_rows<C>(d_v, words, d_out);
  pack_rows<C>(d_scores, words);
  store_d_scores<C>(memory.d_scores(tile, stage) + rows(C::kElementBytes), words);
  add_key_rows<C>(d_k, words, q);
}

// Both warps of a key tile have sums of it: one adds up and stores dV, the other dK. All have left shared memory.
template <typename C>
__device__ __forceinline__ void store_both(const BackwardParams& params, const KeyItem& item, std::uint32_t shared,
                                           KeySums<C>& d_k, KeySums<C>& d_v) {
  constexpr int kElements = C::kHeadDim;  // of a lane
  const bool has_values = own_part<C>() == 0;
  const auto place = [&](int warp) {
    return shared + static_cast<std::uint32_t>(warp * 32 * kElements * 4) + 4 * own_lane();
  };
  const int warp = own_thread() >> 5;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float x =
        has_values ? d_k[i * 2 / kElements][i % (kElements / 2)] : d_v[i * 2 / kElements][i % (kElements / 2)];
    ptx::store_shared(place(warp) + 128 * i, __float_as_uint(x));
  }
  meet();
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float other = __uint_as_float(ptx::load_shared(place(warp ^ 1) + 128 * i));
    float& k = d_k[i * 2 / kElements][i % (kElements / 2)];
    float& v = d_v[i * 2 / kElements][i % (kElements / 2)];
    k = has_values ? v + other : other + k;
  }
  store_keys<C>(params, item, has_values ? params.d_v : params.d_k,
                (has_values ? params.fp32_d_v : params.fp32_d_k) != 0, has_values ? 1.0f : params.d_k_scale, d_k, 0);
}

template <typename C>
__device__ __forceinline__ void walk_key_rows(const BackwardParams& params, const KeySupply<C>& supply) {
  using K = typename C::Keys;
  const KeyMemory<C>& memory = supply.memory;
  const KeyShared& shared = supply.shared;
  const auto load = [&](int number) {  // every step has a group of copies, if an empty one
    if (number < shared.step_count) {
      if (params.key_tiles == K::kMaxTiles) {
        supply.template load<32 * K::kSplit * K::kMaxTiles>(number, own_thread());
      } else {
        supply.template load<32 * K::kSplit * K::kMaxTiles / 2>(number, own_thread());
      }
    }
    ptx::cp_async_commit();
  };
  KeySums<C> d_k = {}, d_v = {};
  if (shared.step_count > 0) supply.load_keys(own_thread(), static_cast<int>(blockDim.x));
  load(0);
  load(1);
  ptx::cp_async_wait<1>();
  meet();  // the first step's rows, K and V are there for all
#pragma unroll 1
  for (int number = 0; number < shared.step_count; ++number) {
    if (own_thread() == 0 && number > 0) supply.pass_on(number - 1);
    std::int32_t seen = 0;
    if (own_thread() == 32) seen = supply.ask(number);
    add_step<C>(params, shared.item, shared.step(number), memory, number, d_k, d_v);
    if (own_thread() == 32) supply.await(number, seen);
    if (own_thread() >= 32 && own_thread() < 64) supply.describe_ahead(number);
    ptx::cp_async_wait<0>();
    meet();  // dS and the next step's rows are there for all, this step's rows are free, and it is this CTA's turn
    load(number + 2);
    add_queries_in_turn<C>(params, shared.step(number), memory, number & 1);
  }
  meet();  // all have added, and left shared memory
  if (own_thread() == 0 && shared.step_count > 0) {
    supply.pass_on(shared.step_count - 1);
    supply.pass_on(shared.step_count);
  }
  store_both<C>(params, shared.item, memory.keys(0), d_k, d_v);
}

template <typename C>
__global__ void __launch_bounds__(C::Keys::kMaxThreads, C::Keys::kCtas)
    general_key_row_gradients(const __grid_constant__ BackwardParams params) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, bytes, 128);
  alignas(KeyShared) __shared__ std::uint8_t item_bytes[sizeof(KeyShared)];
  KeyShared& shared = *reinterpret_cast<KeyShared*>(item_bytes);
  const KeySupply<C> supply{params, shared, {ptx::shared_address(bytes), params.key_tiles}};
  supply.begin();
  walk_key_rows<C>(params, supply);
}

}  // namespace dspattn::cuda::general::backward
