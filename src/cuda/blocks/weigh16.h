// How a consumer warpgroup turns a tile's scores into weights: selected, exponentiated relative to a reference, packed
// with their metadata for the output product. And what becomes of a reference that turns out too small.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/blocks/quad_sums.h"
#include "cuda/blocks/rest16.h"
#include "cuda/blocks/scores16.h"
#include "cuda/ptx/pin.h"

namespace dspattn::cuda::blocks {

// Operands, below: what holds the output product's operands and result: weights[kTileK / 8], metadata[kTileK / 64] and
// out[kHeadDim / 2], as in Products of products16.h.
template <typename C>
struct Weigher {
  const ScoreScales& scales;
  tile::QuadTranspose transpose;
  RowState state;
  float tile0 = 0, tile1 = 0;  // sums of the last tile's weights, not yet in `state`
  [[no_unique_address]] RestState<C> rest;
  [[no_unique_address]] CoarseState<C> coarse;
  [[no_unique_address]] std::conditional_t<C::kSumsByProduct, QuadSums, NoQuadSums> quad;

  // coarse_slope: of the scales, where kCoarseRest.
  __device__ __forceinline__ Weigher(const ScoreScales& s, int lane, std::uint32_t coarse_slope = 0)
      : scales(s), coarse(coarse_slope) {
    transpose = tile::QuadTranspose::of_lane(lane & 3);
    quad = decltype(quad)::of_lane();
    ptx::pin(transpose.rotation);
    ptx::pin(transpose.own);
    ptx::pin(transpose.selector);
  }

  // Selects and exponentiates the tile, slice by slice: the exponentials of one run beside the selection of the next,
  // on other pipes. The results are operands of the output product: before_write() must see to it that the product that
  // reads the old ones is done. In fp32, with the weights of pruned keys besides (rest = mean), registers are too few
  // to select a slice ahead.
  template <typename How, typename Packed, typename Operands, typename BeforeWrite>
  __device__ __forceinline__ void weigh_by(const How& exponents, const Packed& packed, Operands& products,
                                           BeforeWrite before_write) {
    tile0 = tile1 = 0;
    constexpr int kSlices = C::kTileK / 32;
    constexpr bool kAhead = !(C::kRestMean && std::is_same_v<How, Exponents>);
    constexpr int kHeld = kAhead ? C::kHeldSlices : 1;
    constexpr bool kTakesLower = std::is_same_v<Packed, PackedScores<C, Hidden::lower>>;
    Slice slices[2];
    tile::KeptPair pairs[2];
    std::uint32_t word[2] = {}, across[2] = {};
    float values[kHeld][8];
    RestSumOf<How> left_out;
    constexpr bool kByProduct = C::kSumsByProduct && std::is_base_of_v<HalfExponents, How>;
    float sums[4] = {0, 0, 0, 0};  // kByProduct
    constexpr bool kSumsAtOnce = std::is_base_of_v<HalfExponents, How> || C::kConsumers == 3;
    const auto write = [&](int u, const float* value) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        products.weights[4 * u + i] = C::kType == DType::bf16 ? ptx::pack_bf16x2(value[2 * i], value[2 * i + 1])
                                                              : ptx::pack_f16x2(value[2 * i], value[2 * i + 1]);
      }
      if (u % 2 == 0) return;
      if constexpr (kTakesLower) {
        products.metadata[u / 2] =
            C::kSelection == Selection::two_of_four ? tile::kLowerTwoOfFour : tile::kLowerOneOfTwo;
      } else {
        products.metadata[u / 2] = transpose.exchange_halves(word[u / 2 % 2], across[u / 2 % 2]);
      }
    };
    const auto select = [&]<int kSlice>() {
      if constexpr (kTakesLower) {
        take_slice<C, kSlice>(packed, slices[kSlice % 2]);
      } else {
        pairs[kSlice % 2] = select_slice<C, kSlice>(packed, slices[kSlice % 2], [&](const tile::LeftOut& scores) {
          if constexpr (kSumsAtOnce) left_out.add(exponents, scores);
        });
      }
    };
    if constexpr (kAhead) select.template operator()<0>();
    [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
      (
          [&] {
            constexpr int u = kIndex;
            if constexpr (!kAhead) select.template operator()<u>();
            if constexpr (kAhead && u + 1 < kSlices) select.template operator()<u + 1>();
            const Slice& slice = slices[u % 2];
            float* value = values[u < kHeld ? u : 0];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              exponents.weigh(slice.first[i], slice.second[i], value + 4 * i);
              const float* x = value + 4 * i;
              if constexpr (kByProduct) {
                quad.add(x[0], x[1], x[2], x[3], sums);
              } else {
                tile0 += x[0] + x[1];
                tile1 += x[2] + x[3];
              }
            }
            if constexpr (u % 2 == (kAhead ? 0 : 1) && !kTakesLower) {
              const std::uint32_t codes = C::kSelection == Selection::two_of_four
                                              ? tile::metadata_two_of_four(pairs[0], pairs[1])
                                              : tile::metadata_one_of_two(pairs[0], pairs[1]);
              word[u / 2 % 2] = transpose.exchange_pairs(codes, __shfl_xor_sync(~0u, codes, 1));
              across[u / 2 % 2] = __shfl_xor_sync(~0u, word[u / 2 % 2], 2);
            }
            if constexpr (u == kHeld - 1) {
              before_write();
#pragma unroll
              for (int held = 0; held < kHeld; ++held) write(held, values[held]);
            } else if constexpr (u >= kHeld) {
              write(u, value);
            }
          }(),
          ...);
    }
    (std::make_integer_sequence<int, kSlices>{});
    if constexpr (kByProduct) {
      tile0 = sums[0];
      tile1 = sums[2];
    }
    // In fp32 the weights of what is left out are taken after the others, for want of registers. Where the upper half
    // of a block is hidden (kTakesLower) nothing is left out.
    if constexpr (C::kRestMean && !kSumsAtOnce && !kTakesLower) {
      if constexpr (!C::kGeneral) {  // whose scores are packed already
#pragma unroll
        for (float& score : products.scores)
          score *= scales.opaque_one;  // else what was packed before is kept until now
      }
      sum_left_out<C>(packed, exponents, left_out);
    }
    rest.set_tile(left_out, state);
  }

  // How a tile is weighed, and how once more where that was not good enough.
  __device__ __forceinline__ Exponents precise_exponents() const { return Exponents::of<C>(scales, state); }
  __device__ __forceinline__ auto exponents() const {
    if constexpr (C::kHalfExponentials) {
      return HalfExponents{scales.exp2_scale_half, state.minus};
    } else {
      return precise_exponents();
    }
  }

  template <typename Packed, typename Operands, typename BeforeWrite>
  __device__ __forceinline__ void weigh(const Packed& packed, Operands& products, BeforeWrite before_write) {
    weigh_by(exponents(), packed, products, before_write);
  }
  // A tile that is not an item's first and of which nothing is hidden.
  template <typename Packed, typename Operands, typename BeforeWrite>
  __device__ __forceinline__ void weigh_inner(const Packed& packed, Operands& products, BeforeWrite before_write) {
    if constexpr (kCoarseRest<C>) {
      weigh_by(CoarseRestExponents{exponents(), {coarse.slope, coarse.offset}}, packed, products, before_write);
    } else {
      weigh(packed, products, before_write);
    }
  }

  // Sets the reference to the tile's largest score, or a sample of them, and weighs the tile. Consumer::settle() mends
  // what a sample misses.
  template <typename Packed, typename Operands>
  __device__ __forceinline__ void first_tile(const Packed& packed, Operands& products) {
    state = empty_rows();
    rest = {};
    if constexpr (C::kGeneral) {
      const Raised raised = raise_reference<C>(packed, scales, state);
      weigh(packed, products, [] {});
      forget_unset(raised, state);
    } else {
      sample_reference<C>(packed, scales, state);
      coarse.hold(state);
      weigh(packed, products, [] {});
    }
  }

  // Whether the last tile's weights are small enough; not when a row had no reference, which made them NaN. And whether
  // `also` is true, which then costs no branch of its own.
  __device__ __forceinline__ bool weights_fit(bool also = true) const {
    return __all_sync(~0u, also && tile0 < C::kWeightLimit && tile1 < C::kWeightLimit) != 0;
  }
  // Before the references are used.
  __device__ __forceinline__ void recall_references() { coarse.recall(state); }
  __device__ __forceinline__ void add_weights() {
    state.sum0 += tile0;
    state.sum1 += tile1;
    rest.add_tile();
  }

  // Raises the reference to the tile's largest score and weighs the tile once more.
  template <typename Packed, typename Operands>
  __device__ __forceinline__ void weigh_again(const Packed& packed, Operands& products) {
    coarse.recall(state);
    const CoarseOctaves before = CoarseOctaves::of(state);
    const Raised raised = raise_reference<C>(packed, scales, state);
    shrink(raised, state, products.out);
    rest.shrink(raised, before, state);
    if constexpr (kCoarseRest<C>) {
      const Exponents exponents = precise_exponents();
      forget_unset(raised, state);
      coarse.hold(state);
      weigh_by(exponents, packed, products, [] {});
    } else {
      weigh_by(precise_exponents(), packed, products, [] {});
      forget_unset(raised, state);
    }
  }
};

}  // namespace dspattn::cuda::blocks
