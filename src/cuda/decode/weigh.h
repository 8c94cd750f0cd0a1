// From a tile's scores to weights, for the up to 16 rows of a warp: scale, bias, mask, select, exponentiate. For fp32,
// for rows too long for registers (weigh16.h), and for heads that choose together (together.h).
//
// Scores pass through shared memory, where the four keys of a group are neighbours. A row's groups are dealt to 32 /
// rows lanes, so that one row keeps all lanes busy as well as sixteen do.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decode/part.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/single.h"

namespace dspattn::cuda::decode {

// A row of a mask tensor.
struct MaskRow {
  const std::uint8_t* data = nullptr;  // null: absent
  std::int64_t key_bytes = 0;

  __device__ __forceinline__ MaskRow(const blocks::MaskTensor& mask, int element, int batch, int head, int query) {
    if (mask.data == nullptr) return;
    const std::int64_t offset = batch * mask.batch_stride + head * mask.head_stride + query * mask.row_stride;
    data = static_cast<const std::uint8_t*>(mask.data) + offset * element;
    key_bytes = mask.key_stride * element;
  }
  __device__ __forceinline__ const std::uint8_t* at(int key) const { return data + key * key_bytes; }
};

// Where a warp's scores, weights and codes lie.
struct WarpTiles {
  std::uint8_t* scores;
  std::uint8_t* weights;
  std::uint8_t* codes;

  // `buffer`: of those for weights and codes.
  __device__ __forceinline__ WarpTiles(const SharedLayout& layout, std::uint8_t* shared, int warp, int buffer = 0)
      : scores(shared + layout.scores + warp * layout.scores_bytes),
        weights(shared + layout.weights + (warp * layout.buffers + buffer) * layout.weights_bytes),
        codes(shared + layout.codes + (warp * layout.buffers + buffer) * layout.codes_bytes) {}
};

// Two fp32 scores as the fp16 numbers that are compared.
__device__ __forceinline__ void round_to_half(float& a, float& b) {
  ptx::unpack_f16x2(ptx::pack_f16x2_clamped(a, b), a, b);
}

// As the fp16 numbers that are compared, if they are.
__device__ __forceinline__ float4 compared(const Params& p, float4 x) {
  if (p.scales.rounds != 0) {
    round_to_half(x.x, x.y);
    round_to_half(x.z, x.w);
  }
  return x;
}

// False: the bias masks the key.
template <typename C>
__device__ __forceinline__ bool add_bias(const Params& p, const std::uint8_t* bias, float& score) {
  float value;
  if (p.bias_bytes == 4) {
    value = *reinterpret_cast<const float*>(bias);
  } else {
    const std::uint32_t bits = *reinterpret_cast<const std::uint16_t*>(bias);
    float unused;
    if (C::kType == DType::bf16) {
      value = __uint_as_float(bits << 16);
    } else {
      ptx::unpack_f16x2(bits, value, unused);
    }
  }
  const float total = fmaf(value, p.scales.bias, score);
  // A finite bias does not mask, however low: sums stay finite.
  score = std::isinf(total) && !std::isinf(value) ? copysignf(3.402823466e38f, total) : total;
  return value != -INFINITY;
}

// Compared scores of a group where masks matter: the row sees keys [begin, end). `first`: key of the group's first
// element. Called, so that the loop over tiles is short without it.
template <typename C>
[[gnu::noinline]] __device__ float4 mask_group(const Params& p, float4 raw, int first, int begin, int end, int batch,
                                               MaskRow allowed, MaskRow bias) {
  float x[4] = {raw.x, raw.y, raw.z, raw.w};
  bool seen[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int key = first + p.keys.key(0, 0, e);
    seen[e] = key >= begin && key < end;
    if (seen[e] && p.pages.table != nullptr) seen[e] = p.pages.page_of(batch, key) >= 0;
    if (seen[e] && allowed.data != nullptr) seen[e] = *allowed.at(key) != 0;
    x[e] *= p.scales.unit;
    if (seen[e] && bias.data != nullptr) seen[e] = add_bias<C>(p, bias.at(key), x[e]);
  }
  const float4 y = compared(p, make_float4(x[0], x[1], x[2], x[3]));
  return make_float4(seen[0] ? y.x : -INFINITY, seen[1] ? y.y : -INFINITY, seen[2] ? y.z : -INFINITY,
                     seen[3] ? y.w : -INFINITY);
}

template <typename C>
struct Weigher {
  const Params& p;
  float4* scores;  // of this lane's row, a group each
  std::uint32_t* weights;
  std::uint8_t* codes;
  int batch;
  int row;          // of the warp's
  int lanes;        // of a row
  int first_group;  // of this lane
  bool has_row;
  int begin = 0, end = 0;  // keys that the row sees by diagonal, window and length
  MaskRow allowed, bias;
  bool plain;                   // no mask tensors
  float reference = -INFINITY;  // the largest score so far
  float sum = 0;                // of this lane's weights, relative to it
  float rest = 0;               // of those the pruned keys'
  int page = 0;                 // look_up()'s

  // `first_row` is the warp's first of the part's rows.
  __device__ __forceinline__ Weigher(const Params& params, const SharedLayout& layout, const WarpTiles& tiles,
                                     const Part& part, int first_row, int lane)
      : Weigher(params, layout, tiles, part.band, part.batch, part.kv_head, lane, lane >> params.lane_shift,
                part.packed_row(params, first_row + (lane >> params.lane_shift))) {
    has_row = first_row + row < part.rows;
  }

  // Calls visit(group) for every group of the row that is this lane's. Two at a time: one alone would wait for every
  // instruction before the next.
  template <int kUnroll = C::kPanels <= 2 ? 2 : 1, typename Visit>
  __device__ __forceinline__ void each_group(Visit visit) const {
    if (!has_row) return;
#pragma unroll kUnroll
    for (int group = first_group; group < C::kGroups; group += lanes) visit(group);
  }

  // Weights and codes go there from now on.
  __device__ __forceinline__ void write_to(const WarpTiles& tiles, const SharedLayout& layout) {
    weights = reinterpret_cast<std::uint32_t*>(tiles.weights + row * layout.weights_stride);
    codes = tiles.codes + row * C::kGroups;
  }

  // Before a tile of that block is masked, and ahead of it: whether its keys are in some page. Of 16 keys, a lane each,
  // since pages are multiples of 16.
  __device__ __forceinline__ void look_up(int block) {
    if (p.pages.table == nullptr) return;
    const int key = block + 16 * static_cast<int>(threadIdx.x & 7);
    page = key < p.n_k ? p.pages.page_of(batch, key) : -1;
  }
  __device__ __forceinline__ bool pages_are_there() const { return __all_sync(~0u, page >= 0) != 0; }

  // Weighs a tile whose block of 128 keys begins at key `block`. Returns by how much the row's results so far shrink.
  __device__ __forceinline__ float weigh(int block, int part) {
    const float shrink = raise(mask(block, part));
    each_group([&](int group) {
      const float4 x = scores[group];
      const tile::KeptOfFour kept = select(x);
      const float first = element(x, kept.first), second = element(x, kept.second);
      codes[group] = static_cast<std::uint8_t>(tile::kept_code(kept, first == -INFINITY, second == -INFINITY));
      store_weights(group, first, second);
      if (C::kSumsPruned && p.keeps_rest()) add_pruned(kept, [&](int e) { return weight(element(x, e)); });
    });
    return shrink;
  }

  // Makes compared scores of a tile's products. Returns the largest of this lane's.
  __device__ __forceinline__ float mask(int block, int part) {
    float largest = -INFINITY;
    const auto note = [&](int group, const float4& x) {
      scores[group] = x;
      const float top = ptx::max_nan(ptx::max_nan(x.x, x.y), ptx::max_nan(x.z, x.w));
      if (std::isnan(top)) sum = NAN;  // shows in the row's results, whatever is selected
      largest = fmaxf(largest, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
    };
    const bool interior = plain && begin <= block && block + tile::kBlockKeys <= end;
    if (pages_are_there() && interior) {
      const float unit = p.scales.unit;
      each_group([&](int group) {
        const float4 x = scores[group];
        note(group, compared(p, make_float4(x.x * unit, x.y * unit, x.z * unit, x.w * unit)));
      });
    } else {
      each_group<1>([&](int group) {
        const int first = block + p.keys.key(part, group, 0);
        note(group, mask_group<C>(p, scores[group], first, begin, end, batch, allowed, bias));
      });
    }
    return largest;
  }

  // Raises the reference to the largest of the row's lanes' if that is larger. Returns by how much sums shrink.
  __device__ __forceinline__ float raise(float largest) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
    }
    const float raised = fmaxf(reference, largest);
    const float shrink = raised == reference ? 1.0f : ptx::exp2_fast((reference - raised) * p.scales.exponent);
    reference = raised;
    sum *= shrink;
    if (C::kSumsPruned) rest *= shrink;
    return shrink;
  }

  // Relative to the reference. Of a row that has seen no key all scores are -inf, and so are their differences from 0.
  __device__ __forceinline__ float weight(float score) const {
    return ptx::exp2_fast((score - (reference == -INFINITY ? 0.0f : reference)) * p.scales.exponent);
  }

  __device__ __forceinline__ tile::KeptOfFour select(const float4& x) const {
    return p.pairs != 0 ? tile::one_of_each_two(x.x, x.y, x.z, x.w) : tile::two_of_four(x.x, x.y, x.z, x.w);
  }
  __device__ __forceinline__ static float element(const float4& x, int e) {
    return e == 0 ? x.x : e == 1 ? x.y : e == 2 ? x.z : x.w;
  }

  // Of a group's two kept scores.
  __device__ __forceinline__ void store_weights(int group, float first, float second) {
    if constexpr (C::kType == DType::f32) {
      const float weight0 = weight(first), weight1 = weight(second);
      sum += weight0 + weight1;
      weights[2 * group] = __float_as_uint(weight0);
      weights[2 * group + 1] = __float_as_uint(weight1);
    } else {
      weights[group] = weighed(first, second);
    }
  }
  // The same in 16 bits, which the caller stores.
  __device__ __forceinline__ std::uint32_t weighed(float first, float second) {
    return packed(weight(first), weight(second));
  }
  __device__ __forceinline__ std::uint32_t packed(float weight0, float weight1) {
    sum += weight0 + weight1;
    return C::kType == DType::bf16 ? ptx::pack_bf16x2(weight0, weight1) : ptx::pack_f16x2(weight0, weight1);
  }

  // The weights of a group's keys that are not kept, where they count.
  template <typename WeightOf>
  __device__ __forceinline__ void add_pruned(const tile::KeptOfFour& kept, WeightOf weight_of) {
    float pruned = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e != kept.first && e != kept.second) pruned += weight_of(e);
    }
    sum += pruned;
    rest += pruned;
  }

  // Leaves the rows' stats where the CTA joins them: those of the warp.
  __device__ __forceinline__ void deposit_stats(RowStats* stats) const {
    float total = sum, pruned = rest;
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      total += __shfl_xor_sync(~0u, total, offset);
      pruned += __shfl_xor_sync(~0u, pruned, offset);
    }
    if (first_group == 0) stats[row] = {reference, total, pruned};
  }

 private:
  __device__ __forceinline__ Weigher(const Params& params, const SharedLayout& layout, const WarpTiles& tiles,
                                     const tile::RowBand& band, int sequence, int kv_head, int lane, int row_of_warp,
                                     tile::PackedRow which)
      : p(params),
        scores(reinterpret_cast<float4*>(tiles.scores + row_of_warp * layout.scores_stride)),
        weights(reinterpret_cast<std::uint32_t*>(tiles.weights + row_of_warp * layout.weights_stride)),
        codes(tiles.codes + row_of_warp * C::kGroups),
        batch(sequence),
        row(row_of_warp),
        lanes(1 << params.lane_shift),
        first_group(lane & ((1 << params.lane_shift) - 1)),
        has_row(false),
        begin(band.begin(which.query)),
        end(band.end(which.query)),
        allowed(params.allowed, 1, sequence, kv_head * params.heads_per_kv_head + which.head, which.query),
        bias(params.bias, params.bias_bytes, sequence, kv_head * params.heads_per_kv_head + which.head, which.query),
        plain(params.allowed.data == nullptr && params.bias.data == nullptr) {}
};

}  // namespace dspattn::cuda::decode
