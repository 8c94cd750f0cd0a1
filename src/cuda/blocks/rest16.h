// The weight of a row's pruned keys, which goes to a mean of V (rest = mean, docs/rest.md): summed beside the weights
// that are kept.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/blocks/references.h"
#include "cuda/blocks/scores16.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/pin.h"
#include "cuda/tile/coarse_exp2.h"

namespace dspattn::cuda::blocks {

// Sums over one tile. Weights in fp16 are added in fp16: a lane adds 16 of them for a row, whose errors are no larger
// than those of the weights themselves.
struct HalfRestSum {
  std::uint32_t sums = 0;

  __device__ __forceinline__ void add(const HalfExponents& exponents, const tile::LeftOut& scores) {
    const std::uint32_t first = ptx::exp2_f16x2(exponents.argument(scores.first));
    const std::uint32_t second = ptx::exp2_f16x2(exponents.argument(scores.second));
    sums = ptx::add_f16x2(sums, ptx::add_f16x2(first, second));
  }
  __device__ __forceinline__ void get(float& row0, float& row1) const { ptx::unpack_f16x2(sums, row0, row1); }
};

// Of whole tiles of keys, where exponentials need not be precise one by one: in the lane's coarse_unit().
struct CoarseRestSum {
  std::uint32_t sums = 0;

  __device__ __forceinline__ void add(const CoarseRestExponents& exponents, const tile::LeftOut& scores) {
    sums = ptx::add_f16x2(sums, exponents.coarse.weights(scores.first));
    sums = ptx::add_f16x2(sums, exponents.coarse.weights(scores.second));
  }
  __device__ __forceinline__ void get(float& row0, float& row1) const { ptx::unpack_f16x2(sums, row0, row1); }
};

struct RestSum {
  float sum0 = 0, sum1 = 0;

  __device__ __forceinline__ void add(const Exponents& exponents, const tile::LeftOut& scores) {
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

// The sum that goes with a way to take exponentials.
template <typename How>
using RestSumOf = std::conditional_t<std::is_base_of_v<CoarseRestExponents, How>, CoarseRestSum,
                                     std::conditional_t<std::is_base_of_v<HalfExponents, How>, HalfRestSum, RestSum>>;

// Sums up what is not kept of a tile.
template <typename C, typename Packed>
__device__ __forceinline__ void sum_left_out(const Packed& packed, const Exponents& exponents, RestSum& sum) {
#pragma unroll
  for (int m = 0; m < C::kTileK / 16; ++m) {
    sum.add(exponents, left_out<C>(packed.word(m, 0), packed.word(m, 1), packed.word(m, 2), packed.word(m, 3)));
  }
}

// What makes coarse weights of scores, for the references of a thread's two rows; and where references are between two
// uses. Those of fp16 are in RowState::minus already. Of the others, whose weights always come from the second pass,
// the offset is not needed: its half holds the reference, a whole number of kLargeUnit.
template <typename C, bool kPresent = kCoarseRest<C>>
struct CoarseState {
  std::uint32_t slope, offset = 0;

  __device__ __forceinline__ explicit CoarseState(std::uint32_t coarse_slope) : slope(coarse_slope) {}

  // When references have changed.
  __device__ __forceinline__ void hold(const RowState& state) {
    const std::uint32_t offsets = tile::coarse_offset(tile::coarse_reference(state.minus),
                                                      tile::coarse_lane_offset(static_cast<int>(threadIdx.x) & 3));
    offset = offsets;
    if constexpr (!C::kHoldsReferences) {
      ptx::pin(offset);
      return;
    }
    const std::uint32_t units = (units_of(state.minus0) & 0xFFFFu) | units_of(state.minus1) << 16;
    offset = ptx::bit_select(ptx::equal_f16x2(state.minus, state.minus), offsets, units);
    ptx::pin(offset);  // else it is computed anew in every tile
  }
  // RowState::minus0 and minus1: where they are needed, which is rarely. So no register holds them in the loop.
  __device__ __forceinline__ void recall(RowState& state) const {
    if constexpr (!C::kHoldsReferences) return;
    float minus0, minus1;
    ptx::unpack_f16x2(state.minus, minus0, minus1);
    state.minus0 = std::isnan(minus0) ? large(offset << 16) : minus0;
    state.minus1 = std::isnan(minus1) ? large(offset) : minus1;
  }

 private:
  static constexpr int kUnset = -0x8000;  // a row without a visible key yet

  __device__ __forceinline__ static std::uint32_t units_of(float minus) {
    return static_cast<std::uint32_t>(std::isnan(minus) ? kUnset : static_cast<int>(rintf(minus / kLargeUnit)));
  }
  // From a word's upper half.
  __device__ __forceinline__ static float large(std::uint32_t word) {
    const int units = static_cast<int>(word) >> 16;
    return units == kUnset ? NAN : kLargeUnit * static_cast<float>(units);
  }
};
template <typename C>
struct CoarseState<C, false> {
  __device__ __forceinline__ explicit CoarseState(std::uint32_t /*slope*/) {}
  __device__ __forceinline__ void hold(const RowState& /*state*/) {}
  __device__ __forceinline__ void recall(RowState& /*state*/) const {}
};

// What this lane's sums of coarse weights are multiplied by at the end of an item.
template <typename C>
__device__ __forceinline__ float unit_of_rest() {
  return tile::coarse_unit(ptx::opaque(static_cast<int>(threadIdx.x)) & 3);
}

// By how many octaves (tile::coarse_octaves) whole tiles' weights are larger than others of a thread's two rows.
struct CoarseOctaves {
  float row0, row1;

  __device__ __forceinline__ static CoarseOctaves of(const RowState& state) {
    CoarseOctaves octaves;
    ptx::unpack_f16x2(tile::coarse_octaves(state.minus), octaves.row0, octaves.row1);
    if (std::isnan(octaves.row0)) octaves.row0 = 0;  // large, or none yet: no coarse weights
    if (std::isnan(octaves.row1)) octaves.row1 = 0;
    return octaves;
  }
};

// Of a thread's two rows; nothing where pruned keys are left out of the softmax. In the lane's unit and relative to the
// reference of whole tiles: others' sums are brought to these.
template <typename C, bool kPresent = C::kRestMean>
struct RestState {
  float sum0 = 0, sum1 = 0;    // so far, of this thread's keys
  float tile0 = 0, tile1 = 0;  // of the last tile, not yet in those

  template <typename Sums>
  __device__ __forceinline__ void set_tile(const Sums& sums, const RowState& state) {
    sums.get(tile0, tile1);
    if constexpr (kCoarseRest<C> && !std::is_same_v<Sums, CoarseRestSum>) {
      const float per_unit = 1.0f / unit_of_rest<C>();
      const CoarseOctaves octaves = CoarseOctaves::of(state);
      tile0 *= per_unit * ptx::exp2_fast(octaves.row0);
      tile1 *= per_unit * ptx::exp2_fast(octaves.row1);
    }
  }
  __device__ __forceinline__ void add_tile() {
    sum0 += tile0;
    sum1 += tile1;
  }
  // When references have been raised; `before`: of the state until then.
  __device__ __forceinline__ void shrink(const Raised& by, const CoarseOctaves& before, const RowState& state) {
    sum0 *= by.shrink0;
    sum1 *= by.shrink1;
    if constexpr (kCoarseRest<C>) {
      const CoarseOctaves octaves = CoarseOctaves::of(state);
      sum0 *= ptx::exp2_fast(octaves.row0 - before.row0);
      sum1 *= ptx::exp2_fast(octaves.row1 - before.row1);
    }
  }
  // Weights relative to the state's references.
  __device__ __forceinline__ void get(const RowState& state, float& row0, float& row1) const {
    row0 = sum0;
    row1 = sum1;
    if constexpr (kCoarseRest<C>) {
      const CoarseOctaves octaves = CoarseOctaves::of(state);
      row0 *= unit_of_rest<C>() * ptx::exp2_fast(-octaves.row0);
      row1 *= unit_of_rest<C>() * ptx::exp2_fast(-octaves.row1);
    }
  }
};
template <typename C>
struct RestState<C, false> {
  template <typename Sums>
  __device__ __forceinline__ void set_tile(const Sums&, const RowState&) {}
  __device__ __forceinline__ void add_tile() {}
  __device__ __forceinline__ void shrink(const Raised&, const CoarseOctaves&, const RowState&) {}
};

}  // namespace dspattn::cuda::blocks
