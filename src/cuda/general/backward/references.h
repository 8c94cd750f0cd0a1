// Rows whose LSE lies so far from 0 that its rounding hides the weights: their largest score and the sum of
// exponentials relative to it, found once more as the forward did. Such scores are biases of the size of the largest
// numbers, as models write masks; 16-bit inputs' scores end at 65504 times a scale, and so do their LSEs.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/general/backward/params.h"
#include "cuda/general/backward/products.h"
#include "cuda/general/backward/scores.h"

namespace dspattn::cuda::general::backward {

// LSEs, base 2, beyond this are of little use: fp32 has steps of 1/512 there, half of which is 0.07 % of a weight.
inline constexpr float kFarLse = 0x1p14f;

// Infinite ones of fp32 inputs too: a row without a key has one, but so have rows whose LSE fp32 does not hold.
template <typename C>
__device__ __forceinline__ bool is_far(float lse) {
  return fabsf(lse) >= kFarLse && (C::kIsFp32 || !std::isinf(lse));
}

// The sums of 16 rows hold, for a lane's two rows: largest score 0, 1, sum 0, 1.
template <typename C>
__device__ __forceinline__ void add_to_references(float scale, const Block<C>& scores,
                                                  float (&sums)[C::Queries::kColumns / 2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float largest = sums[row];
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) largest = fmaxf(largest, scores[element_of(i, row)]);
    if (largest == -INFINITY) continue;
    float sum = sums[row] == -INFINITY ? 0.0f : sums[2 + row] * ptx::exp2_fast((sums[row] - largest) * scale);
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) sum += ptx::exp2_fast((scores[element_of(i, row)] - largest) * scale);
    sums[row] = largest;
    sums[2 + row] = sum;
  }
}

// Whether any of the CTA's rows needs it.
template <typename C, typename ItemType>
__device__ __forceinline__ bool any_far(const BackwardParams& params, const ItemType& item) {
  const int rows = min(C::Queries::kTileQ, item.score.rows - item.row_begin);
  bool any = false;
#pragma unroll 1
  for (int row = static_cast<int>(own_lane()); row < rows; row += 32) {
    any = any || is_far<C>(params.prepared.numbers[item.prepared_row + row].lse);
  }
  return __all_sync(~0u, !any) == 0;
}

// All lanes' shares put together, and written to the rows' numbers. A sink is one more term of the sum.
template <typename C, typename ItemType>
__device__ __forceinline__ void store_references(
    const BackwardParams& params, const ItemType& item,
    const float (&sums)[C::Queries::kRowBlocks][C::Queries::kColumns / 2]) {
  const float scale = params.scales.exp2_scale;
#pragma unroll
  for (int i = 0; i < 2 * C::Queries::kRowBlocks; ++i) {
    const float largest = sums[i / 2][i % 2];
    const float sum = sums[i / 2][2 + i % 2];
    float top = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float all = largest == -INFINITY ? 0.0f : sum * ptx::exp2_fast((largest - top) * scale);
    all += __shfl_xor_sync(~0u, all, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    if (params.sinks != nullptr) {
      constexpr float kLog2E = 1.442695040888963f;
      all += ptx::exp2_fast(params.sinks[item.score.head * params.sink_stride] * kLog2E - top * scale);
    }
    const int row = (own_thread() >> 5) * 16 * C::Queries::kRowBlocks + 8 * i + static_cast<int>(own_lane() >> 2);
    RowNumbers& numbers = params.prepared.numbers[item.prepared_row + row];
    if ((own_lane() & 3) == 0 && is_far<C>(numbers.lse) && top != -INFINITY && std::isfinite(all)) {
      numbers.reference = top;
      numbers.lse = ptx::log2_fast(all);
    }
  }
}

}  // namespace dspattn::cuda::general::backward
