// The weight of a row's pruned keys, which goes to a mean of V (rest = mean, docs/rest.md): summed beside the weights
// that are kept.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/blocks/references.h"
#include "cuda/blocks/scores16.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/tile/coarse_exp2.h"

namespace dspattn::cuda::blocks {

// Sums over one tile. Weights in fp16 are added in fp16: a lane adds 16 of them for a row, whose errors are no larger
// than those of the weights themselves.
template <int kByPolynomial>
struct HalfRestSum {
  std::uint32_t sums = 0;
  std::uint32_t scaled = 0;

  __device__ __forceinline__ void add(const HalfExponents& exponents, const tile::LeftOut& scores, int index = 0) {
    const std::uint32_t x = exponents.argument(scores.first);
    const std::uint32_t y = exponents.argument(scores.second);
    if (kByPolynomial == 0 || (kByPolynomial == 3 && index % 2 == 0)) {
      sums = ptx::add_f16x2(sums, ptx::add_f16x2(ptx::exp2_f16x2(x), ptx::exp2_f16x2(y)));
    } else {
      if constexpr (kByPolynomial == 1 || kByPolynomial == 3) {
        sums = ptx::add_f16x2(sums, ptx::exp2_f16x2(x));
      } else {
        scaled = tile::add_fine_exp2_f16x2(x, scaled);
      }
      scaled = tile::add_fine_exp2_f16x2(y, scaled);
    }
  }
  __device__ __forceinline__ void set(float row0, float row1) {
    sums = ptx::pack_f16x2(row0, row1);
    scaled = 0;
  }
  __device__ __forceinline__ void get(float& row0, float& row1) const {
    ptx::unpack_f16x2(sums, row0, row1);
    if constexpr (kByPolynomial > 0) {
      float low, high;
      ptx::unpack_f16x2(scaled, low, high);
      row0 = fmaf(low, 0x1p-10f, row0);
      row1 = fmaf(high, 0x1p-10f, row1);
    }
  }
};

struct RestSum {
  float sum0 = 0, sum1 = 0;

  __device__ __forceinline__ void add(const Exponents& exponents, const tile::LeftOut& scores, int = 0) {
    float values[4];
    exponents.weigh(scores.first, scores.second, values);
    sum0 += values[0] + values[1];
    sum1 += values[2] + values[3];
  }
  __device__ __forceinline__ void get(float& row0, float& row1) const {
    row0 = sum0;
    row1 = sum1;
  }
};

template <typename C>
HalfRestSum<C::kByPolynomial> rest_sum_of(const HalfExponents&);
template <typename C>
RestSum rest_sum_of(const Exponents&);

// The sum that goes with a way to take exponentials.
template <typename C, typename How>
using RestSumOf = decltype(rest_sum_of<C>(How{}));

// Sums up what is not kept of a tile.
template <typename C, typename Packed>
__device__ __forceinline__ void sum_left_out(const Packed& packed, const Exponents& exponents, RestSum& sum) {
#pragma unroll
  for (int m = 0; m < C::kTileK / 16; ++m) {
    sum.add(exponents, left_out<C>(packed.word(m, 0), packed.word(m, 1), packed.word(m, 2), packed.word(m, 3)));
  }
}

// Of a thread's two rows; nothing where pruned keys are left out of the softmax. Where exponentials are taken in fp16,
// a tile's sums are two fp16 numbers: registers are short, and what they lose is less than the weights have lost. Those
// of its last C::kDeferredSlices slices are taken when the next tile's products have been issued, under which they cost
// less than in front of them.
template <typename C, bool kPresent = C::kRestMean>
struct RestState {
  using Tile = std::conditional_t<C::kHalfExponentials, HalfRestSum<C::kByPolynomial>, RestSum>;
  static constexpr int kDeferred = 4 * C::kDeferredSlices;

  float sum0 = 0, sum1 = 0;  // so far, of this thread's keys
  Tile tile;                 // of the last tile, not yet in those
  tile::LeftOut deferred[kDeferred / 2 > 0 ? kDeferred / 2 : 1];  // the last tile's scores that are not yet in those
  std::uint32_t minus = kNoWeight;                                // minus the reference of these

  static constexpr std::uint32_t kNoWeight = 0xFC00FC00u;  // -inf twice

  __device__ __forceinline__ void set_tile(const Tile& sums) { tile = sums; }
  __device__ __forceinline__ void set_tile(const RestSum& sums) requires(!std::is_same_v<Tile, RestSum>) {
    tile.set(sums.sum0, sums.sum1);
  }
  // Scores of the last tile whose weights are taken later, and how.
  __device__ __forceinline__ void defer(int index, const tile::LeftOut& scores) { deferred[index] = scores; }
  __device__ __forceinline__ void defer_to(const HalfExponents& exponents) { minus = exponents.minus; }
  __device__ __forceinline__ void defer_nothing() {
    minus = kNoWeight;
#pragma unroll
    for (tile::LeftOut& scores : deferred) scores = {0, 0};
  }
  // When the tile's weights fit their reference.
  __device__ __forceinline__ void add_tile() {
    if constexpr (kDeferred == 0) add_sums();
  }
  // When the products of the next tile, if there is one, have been issued.
  __device__ __forceinline__ void add_deferred(std::uint32_t scale) {
    if constexpr (kDeferred > 0) {
      const HalfExponents exponents{scale, minus};
#pragma unroll
      for (const tile::LeftOut& scores : deferred) tile.add(exponents, scores);
      add_sums();
    }
  }
  __device__ __forceinline__ void shrink(const Raised& by) {
    sum0 *= by.shrink0;
    sum1 *= by.shrink1;
  }

 private:
  __device__ __forceinline__ void add_sums() {
    float tile0, tile1;
    tile.get(tile0, tile1);
    sum0 += tile0;
    sum1 += tile1;
  }
};
template <typename C>
struct RestState<C, false> {
  template <typename Sums>
  __device__ __forceinline__ void set_tile(const Sums&) {}
  __device__ __forceinline__ void defer(int, const tile::LeftOut&) {}
  __device__ __forceinline__ void defer_to(const HalfExponents&) {}
  __device__ __forceinline__ void defer_nothing() {}
  __device__ __forceinline__ void add_tile() {}
  __device__ __forceinline__ void add_deferred(std::uint32_t) {}
  __device__ __forceinline__ void shrink(const Raised&) {}
};

}  // namespace dspattn::cuda::blocks
