// Sums of V by columns: what the kernel that writes means before another (prefix_means.cu) and a kernel that writes
// them itself (means_writer.h) have in common, down to the order of additions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/packed_half.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::blocks {

inline constexpr int kLoadedColumns = 8;  // that a thread loads at once: 16 bytes
// A block's first keys: so many are added up one by one, and the sums of such segments one after the other.
inline constexpr int kSegmentKeys = 16;

// Of the 16 low bits.
template <DType kType>
__device__ __forceinline__ float number_of(std::uint32_t low_half) {
  if constexpr (kType == DType::bf16) return __uint_as_float(low_half << 16);
  float low, high;
  ptx::unpack_f16x2(low_half & 0xFFFFu, low, high);
  return low;
}

template <DType kType>
__device__ __forceinline__ void add_columns(const uint4& x, float (&sums)[kLoadedColumns]) {
  const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sums[2 * i] += number_of<kType>(words[i]);
    sums[2 * i + 1] += number_of<kType>(words[i] >> 16);
  }
}

// Sums of eight columns over the lanes that have them, of a warp that loads rows of 32 * kLaneColumns columns: in the
// end of kLaneColumns each, from lane_column() on.
template <int kLaneColumns>
__device__ __forceinline__ void sum_over_lanes(const float (&sums)[kLoadedColumns], int lane,
                                               float (&own)[kLaneColumns]) {
  const auto exchange = [](float keep, float give, int with) { return keep + __shfl_xor_sync(~0u, give, with); };
  const bool upper = (lane & 16) != 0;
  const bool middle = (lane & 8) != 0;
  float fours[4], twos[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    fours[i] = exchange(upper ? sums[4 + i] : sums[i], upper ? sums[i] : sums[4 + i], 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    twos[i] = exchange(middle ? fours[2 + i] : fours[i], middle ? fours[i] : fours[2 + i], 8);
  }
  if constexpr (kLaneColumns == 2) {
    own[0] = twos[0];
    own[1] = twos[1];
  } else {
    const bool lower = (lane & 4) != 0;
    own[0] = exchange(lower ? twos[1] : twos[0], lower ? twos[0] : twos[1], 4);
  }
}
template <int kLaneColumns>
__device__ __forceinline__ int lane_column(int lane) {
  const int pair = lane % (4 * kLaneColumns) * kLoadedColumns + (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2;
  return kLaneColumns == 2 ? pair : pair + (lane >> 2 & 1);
}

// An entry's number; of no key 0. A division would be a call, around which registers are spilled.
__device__ __forceinline__ float mean_of(float sum, int count) {
  return count > 0 ? sum * ptx::reciprocal_fast(static_cast<float>(count)) : 0.0f;
}

}  // namespace dspattn::cuda::blocks
