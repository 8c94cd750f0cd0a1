// From the scores of one key tile to sparse weights, for one warpgroup: round to packed fp16, mask, select,
// exponentiate.
//
// A thread holds rows g and g + 8 of its warp's 16 (g = lane / 4) and, of every group of four keys in its quad's share,
// all four.
#pragma once

#include <cstdint>

#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/tile/select.h"

namespace dspattn::cuda::sm90 {

// Rounding to fp16 clamps to this. Masked scores are -inf in fp32 and become the same: no score that a softmax could
// still tell from 0 lies there.
inline constexpr float kLowestScore = -65504.0f;

template <typename C>
using Scores = float[C::kTileK / 2];

// Register of `scores` that holds element e of group block m, row g (row g + 8: two further).
template <typename C>
__device__ __forceinline__ constexpr int score_index(int m, int e) {
  return 4 * m + (e & 1) + (e >> 1) * (C::kTileK / 4);
}

__device__ __forceinline__ int clamp_to_block(int x) {
  return x < 0 ? 0 : (x > tile::kBlockKeys ? tile::kBlockKeys : x);
}

// Masks what the diagonal, the window and the key length hide. `position` is the row's place on the diagonal and
// `length` the number of keys, both counted from the block's first key. Key offsets are small integers, exact in fp16,
// so two rows are compared at once.
template <typename C>
__device__ __forceinline__ void mask_band(Scores<C>& scores, const FusedParams& params, int part, int t, int position,
                                          int length) {
  const auto both = [](int x) { return ptx::pack_f16x2(static_cast<float>(x), static_cast<float>(x)); };
  const auto pair = [](int x, int y) { return ptx::pack_f16x2(static_cast<float>(x), static_cast<float>(y)); };
  const auto end = [&](int p) { return clamp_to_block(p + params.right + 1 < length ? p + params.right + 1 : length); };
  const std::uint32_t first = pair(clamp_to_block(position - params.left), clamp_to_block(position + 8 - params.left));
  const std::uint32_t last = pair(end(position), end(position + 8));
  const std::uint32_t step = both(4 * params.keys.group_step);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    std::uint32_t key = both(ptx::opaque(params.keys.key(part, t, e)));
#pragma unroll
    for (int m = 0; m < C::kTileK / 16; ++m) {
      const std::uint32_t hidden = ptx::greater_equal_f16x2(key, last) | ptx::greater_f16x2(first, key);
      const int i = score_index<C>(m, e);
      if ((hidden & 0xFFFFu) != 0) scores[i] = -INFINITY;
      if ((hidden >> 16) != 0) scores[i + 2] = -INFINITY;
      key = ptx::add_f16x2(key, step);
    }
  }
}

// A thread's two rows of a mask tensor, at a block's first key.
struct MaskPointers {
  const std::uint8_t* row0;
  const std::uint8_t* row1;
  int key_bytes;  // between neighbouring keys

  template <typename ItemType>
  __device__ __forceinline__ MaskPointers(const MaskTensor& mask, int element_bytes, const ItemType& item, int row,
                                          int block) {
    const int last = item.rows - 1;  // rows past the end read the last row: their results are not stored
    const auto at = [&](int r) {
      const std::int64_t offset = item.sequence * mask.batch_stride + item.head * mask.head_stride +
                                  (r < last ? r : last) * mask.row_stride +
                                  static_cast<std::int64_t>(block) * tile::kBlockKeys * mask.key_stride;
      return static_cast<const std::uint8_t*>(mask.data) + offset * element_bytes;
    };
    row0 = at(row);
    row1 = at(row + 8);
    key_bytes = static_cast<int>(mask.key_stride) * element_bytes;
  }
};

// Adds the bias; -inf masks. Absent keys read key 0's: they are masked afterwards.
template <typename C>
__device__ __forceinline__ void add_bias(Scores<C>& scores, const FusedParams& params, const MaskPointers& bias,
                                         int keys, int part, int t) {
  const auto load = [&](const std::uint8_t* pointer) {
    if (params.bias_is_f32 != 0) return *reinterpret_cast<const float*>(pointer);
    const std::uint32_t bits = *reinterpret_cast<const std::uint16_t*>(pointer);
    if constexpr (C::kType == DType::bf16) return __uint_as_float(bits << 16);
    float low, high;
    ptx::unpack_f16x2(bits, low, high);
    return low;
  };
#pragma unroll
  for (int m = 0; m < C::kTileK / 16; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = score_index<C>(m, e);
      const int key = ptx::opaque(params.keys.key(part, 4 * m + t, e));
      const int at = (key < keys ? key : 0) * bias.key_bytes;
      scores[i] = fmaf(load(bias.row0 + at), params.bias_scale, scores[i]);
      scores[i + 2] = fmaf(load(bias.row1 + at), params.bias_scale, scores[i + 2]);
    }
  }
}

// Masks what the boolean tensor hides.
template <typename C>
__device__ __forceinline__ void mask_allowed(Scores<C>& scores, const FusedParams& params, const MaskPointers& allowed,
                                             int keys, int part, int t) {
#pragma unroll
  for (int m = 0; m < C::kTileK / 16; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = score_index<C>(m, e);
      const int key = ptx::opaque(params.keys.key(part, 4 * m + t, e));
      const int at = (key < keys ? key : 0) * allowed.key_bytes;
      if (allowed.row0[at] == 0) scores[i] = -INFINITY;
      if (allowed.row1[at] == 0) scores[i + 2] = -INFINITY;
    }
  }
}

// Unfinished metadata of a tile.
template <typename C>
struct Selected {
  std::uint32_t word[C::kTileK / 64];    // metadata after the first exchange over the quad,
  std::uint32_t across[C::kTileK / 64];  // and that of the lane two away
};

// Running softmax state of a thread's two rows. Logarithms are base 2.
struct RowState {
  float sum0, sum1;      // of this thread's weights
  float minus0, minus1;  // minus the reference that weights are relative to; NaN: no visible key yet
};

// Weights of one group's kept scores in the order of a sparse A operand, and their sums added to tile0, tile1.
__device__ __forceinline__ void exponentiate_group(std::uint32_t first, std::uint32_t second, float scale,
                                                   const RowState& state, float* values, float& tile0, float& tile1) {
  float first0, first1, second0, second1;
  ptx::unpack_f16x2(first, first0, first1);
  ptx::unpack_f16x2(second, second0, second1);
  values[0] = ptx::exp2_fast(fmaf(first0, scale, state.minus0));
  values[1] = ptx::exp2_fast(fmaf(second0, scale, state.minus0));
  values[2] = ptx::exp2_fast(fmaf(first1, scale, state.minus1));
  values[3] = ptx::exp2_fast(fmaf(second1, scale, state.minus1));
  tile0 += values[0] + values[1];
  tile1 += values[2] + values[3];
}

// Selects and weighs a quarter. The exponentials of a group follow its selection, so that they overlap the selection of
// the next: the compiler schedules close to the order it is given.
template <typename C>
__device__ __forceinline__ void weigh_quarter(const Scores<C>& scores, int quarter,
                                              const tile::QuadTranspose& transpose, float scale, const RowState& state,
                                              Selected<C>& selected, float (&values)[16], float& tile0, float& tile1) {
  tile::Kept kept[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t p[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = score_index<C>(4 * quarter + i, e);
      p[e] = ptx::pack_f16x2_clamped(scores[at], scores[at + 2]);
    }
    kept[i] = C::kSelection == Selection::two_of_four ? tile::keep_two_of_four(p[0], p[1], p[2], p[3])
                                                      : tile::keep_one_of_two(p[0], p[1], p[2], p[3]);
    exponentiate_group(kept[i].first, kept[i].second, scale, state, values + 4 * i, tile0, tile1);
  }
  const std::uint32_t word =
      C::kSelection == Selection::two_of_four ? tile::metadata_two_of_four(kept) : tile::metadata_one_of_two(kept);
  selected.word[quarter] = transpose.exchange_pairs(word, __shfl_xor_sync(~0u, word, 1));
  selected.across[quarter] = __shfl_xor_sync(~0u, selected.word[quarter], 2);
}

// Raises the references to the tile's largest scores (a row's largest always survives pruning) and returns by how
// much everything accumulated so far must shrink. A row without a visible key yet takes 0 for this tile, and is told
// of in `unset`: forget_unset() then makes the next tile look again.
struct Raised {
  float shrink0, shrink1;
  bool unset0, unset1;
};

template <typename C>
__device__ __forceinline__ Raised raise_reference(const Scores<C>& scores, float scale, RowState& state) {
  std::uint32_t largest = ptx::pack_f16x2_clamped(scores[0], scores[2]);
#pragma unroll
  for (int i = 1; i < C::kTileK / 4; ++i) {
    const int at = 4 * (i >> 1) + (i & 1);
    largest = ptx::max_f16x2(largest, ptx::pack_f16x2_clamped(scores[at], scores[at + 2]));
  }
  largest = ptx::max_f16x2(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = ptx::max_f16x2(largest, __shfl_xor_sync(~0u, largest, 2));
  float top0, top1;
  ptx::unpack_f16x2(largest, top0, top1);
  const auto raise = [&](float top, float& minus, float& shrink, bool& unset) {
    if (top <= kLowestScore) top = -INFINITY;
    // fminf takes the number when the other is NaN: an unset reference, or a NaN score, whose weight shows it.
    const float raised = fminf(minus, -top * scale);
    shrink = minus > raised ? ptx::exp2_fast(raised - minus) : 1.0f;
    unset = raised == INFINITY;
    minus = unset ? 0.0f : raised;
  };
  Raised result;
  raise(top0, state.minus0, result.shrink0, result.unset0);
  raise(top1, state.minus1, result.shrink1, result.unset1);
  return result;
}

__device__ __forceinline__ void forget_unset(const Raised& raised, RowState& state) {
  if (raised.unset0) state.minus0 = NAN;
  if (raised.unset1) state.minus1 = NAN;
}

}  // namespace dspattn::cuda::sm90
