// Joins the results of one row over parts of the keys, and writes them: the same sums for parts of a CTA's teams and
// for those of several CTAs.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decode/params.h"
#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::decode {

// What a part's results are multiplied by, relative to the largest reference. A part without keys counts for nothing,
// whatever its results hold.
__device__ __forceinline__ float part_factor(const RowStats& part, float reference, float exponent) {
  return part.sum == 0 ? 0.0f : ptx::exp2_fast((part.reference - reference) * exponent);
}

// Joins parts of a row, of which part_at(i) is part i, by a warp: lane l takes parts l, l + 32, ... All lanes get the
// result.
template <typename PartAt>
__device__ __forceinline__ RowStats join_parts(int count, int lane, float exponent, PartAt part_at) {
  RowStats joined{-INFINITY, 0};
  for (int i = lane; i < count; i += 32) joined.reference = fmaxf(joined.reference, part_at(i).reference);
  for (int offset = 16; offset > 0; offset /= 2) {
    joined.reference = fmaxf(joined.reference, __shfl_xor_sync(~0u, joined.reference, offset));
  }
  for (int i = lane; i < count; i += 32) {
    const RowStats own = part_at(i);
    if (own.sum != 0) joined.sum += own.sum * part_factor(own, joined.reference, exponent);
  }
  for (int offset = 16; offset > 0; offset /= 2) joined.sum += __shfl_xor_sync(~0u, joined.sum, offset);
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

// A row that sees no key is 0, with a log-sum-exp of -inf.
__device__ __forceinline__ float normalised(float value, float sum) { return sum == 0 ? 0.0f : value / sum; }

__device__ __forceinline__ void store_lse(const Results& results, std::int64_t offset, const RowStats& row,
                                          float exponent) {
  constexpr float kLn2 = 0.6931471805599453f;
  if (results.lse.data == nullptr) return;
  results.lse.data[offset] = row.sum == 0 ? -INFINITY : fmaf(row.reference, exponent, log2f(row.sum)) * kLn2;
}

}  // namespace dspattn::cuda::decode
