// How the results of one row over parts of the keys are joined and written: of a CTA's teams and of several CTAs alike.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/value_means.h"
#include "cuda/decode/params.h"
#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::decode {

// What a part's results are multiplied by, relative to the largest reference. A part without keys counts for nothing,
// whatever its results hold.
template <typename Stats>
__device__ __forceinline__ float part_factor(const Stats& part, float reference, float exponent) {
  return part.sum == 0 ? 0.0f : ptx::exp2_fast((part.reference - reference) * exponent);
}

// Joins parts of a row, of which part_at(i) is part i, by a warp: lane l takes parts l, l + 32, ... All lanes get the
// result; with `keeps_rest` the pruned keys' weights too.
template <typename PartAt>
__device__ __forceinline__ RowStats join_parts(int count, int lane, float exponent, bool keeps_rest, PartAt part_at) {
  RowStats joined{-INFINITY, 0};
  for (int i = lane; i < count; i += 32) joined.reference = fmaxf(joined.reference, part_at(i).reference);
  for (int offset = 16; offset > 0; offset /= 2) {
    joined.reference = fmaxf(joined.reference, __shfl_xor_sync(~0u, joined.reference, offset));
  }
  for (int i = lane; i < count; i += 32) {
    const RowStats own = part_at(i);
    const float factor = part_factor(own, joined.reference, exponent);
    if (own.sum != 0) joined.sum += own.sum * factor;
    if (own.rest != 0) joined.rest += own.rest * factor;
  }
  for (int offset = 16; offset > 0; offset /= 2) joined.sum += __shfl_xor_sync(~0u, joined.sum, offset);
  if (keeps_rest) {
    for (int offset = 16; offset > 0; offset /= 2) joined.rest += __shfl_xor_sync(~0u, joined.rest, offset);
  }
  return joined;
}

__device__ __forceinline__ void store_result(const Results& results, DType type, std::int64_t offset, float value) {
  if (results.fp32 != 0 || type == DType::f32) {
    static_cast<float*>(results.out.data)[offset] = value;
  } else {
    const std::uint32_t bits = type == DType::bf16 ? ptx::pack_bf16x2(value, 0.0f) : ptx::pack_f16x2(value, 0.0f);
    static_cast<std::uint16_t*>(results.out.data)[offset] = static_cast<std::uint16_t>(bits);
  }
}

// The first `count` of four values, at least one, at an address.
__device__ __forceinline__ void store_floats(float* to, const float4& x, int count) {
  if (count >= 4 && (reinterpret_cast<std::uintptr_t>(to) & 15) == 0) {
    *reinterpret_cast<float4*>(to) = x;
    return;
  }
  const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) to[i] = values[i];
  }
}
// The same of results, in their type.
__device__ __forceinline__ void store_results(const Results& results, DType type, std::int64_t offset, const float4& x,
                                              int count) {
  if (results.fp32 != 0 || type == DType::f32) {
    store_floats(static_cast<float*>(results.out.data) + offset, x, count);
    return;
  }
  const auto pack = [&](float low, float high) {
    return type == DType::bf16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
  };
  const uint2 words = {pack(x.x, x.y), pack(x.z, x.w)};
  auto* to = static_cast<std::uint16_t*>(results.out.data) + offset;
  if (count >= 4 && (reinterpret_cast<std::uintptr_t>(to) & 7) == 0) {
    *reinterpret_cast<uint2*>(to) = words;
    return;
  }
  const std::uint32_t halves[4] = {words.x, words.x >> 16, words.y, words.y >> 16};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) to[i] = static_cast<std::uint16_t>(halves[i]);
  }
}

// Adds the weight of a row's pruned keys times the mean of V over what it sees: `keys`. `x`: `count` of its columns
// from `column` on, one to four.
__device__ __forceinline__ void add_rest(const Params& p, int batch, int kv_head, const tile::KeyInterval& keys,
                                         const RowStats& row, int column, int count, float4& x) {
  if (!p.keeps_rest() || row.rest == 0) return;
  const float4 mean = blocks::mean_of_values(p.values, p.value_sums, batch, kv_head, keys, column, count);
  x = make_float4(fmaf(row.rest, mean.x, x.x), fmaf(row.rest, mean.y, x.y), fmaf(row.rest, mean.z, x.z),
                  fmaf(row.rest, mean.w, x.w));
}

// What a row's results are multiplied by. A row that sees no key is 0, with a log-sum-exp of -inf.
__device__ __forceinline__ float normaliser(float sum) { return sum == 0 ? 0.0f : 1.0f / sum; }

__device__ __forceinline__ void store_lse(const Results& results, std::int64_t offset, const RowStats& row,
                                          float exponent) {
  constexpr float kLn2 = 0.6931471805599453f;
  if (results.lse.data == nullptr) return;
  results.lse.data[offset] = row.sum == 0 ? -INFINITY : fmaf(row.reference, exponent, log2f(row.sum)) * kLn2;
}

}  // namespace dspattn::cuda::decode
