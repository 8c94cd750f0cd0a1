// softmax over the nonzeros of each row, in place: scores become weights; optionally LSE = log of the sum of
// exponentials of the kept scores. Memory-bound: a row is read once and written once.
//
// Two kernels: softmax_registers gives a row to 4 ... 32 lanes of a warp, which hold it in registers (kVectors vectors
// of 16 bytes each); softmax_shared gives it to a CTA, which holds it in shared memory, and reads it again from global
// memory when it is too long even for that.
//
// A row whose scores are all -inf becomes zeros with LSE -inf; a NaN makes its row NaN, and no other.
#pragma once

#include <cstdint>

#include "cuda/pipeline/common/params.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::pipeline {

inline constexpr int kSoftmaxThreads = 256;
inline constexpr int kSoftmaxRowThreads = 512;  // of softmax_shared
inline constexpr float kLog2E = 1.4426950408889634f;

// The vectors of one row that the walk visits.
struct RowSegment {
  uint4* vectors = nullptr;
  int count = 0;
  std::int64_t batch = 0, head = 0, row = 0;
};

template <typename Element>
__device__ __forceinline__ RowSegment row_segment(const SoftmaxParams& p, std::int64_t index) {
  constexpr int kVectorElements = kChunkBytes / static_cast<int>(sizeof(Element));
  RowSegment segment;
  const std::int64_t matrix = index / p.matrix.rows;
  segment.row = index % p.matrix.rows;
  segment.batch = matrix / p.heads;
  segment.head = matrix % p.heads;
  const SlotRange slots = p.walk.slots(static_cast<int>(segment.row / p.walk.block), segment.batch);
  const std::int64_t row_elements = p.matrix.places / 2;
  const std::int64_t begin = static_cast<std::int64_t>(slots.begin) * p.walk.block / 2;
  const std::int64_t end = min(static_cast<std::int64_t>(slots.end) * p.walk.block / 2, row_elements);
  segment.vectors = reinterpret_cast<uint4*>(static_cast<Element*>(p.matrix.nonzeros) + index * row_elements + begin);
  segment.count = end > begin ? static_cast<int>((end - begin) / kVectorElements) : 0;
  return segment;
}

template <typename Element>
struct Vector;  // 16 bytes <-> fp32

template <>
struct Vector<float> {
  static constexpr int kElements = 4;
  __device__ static void unpack(uint4 v, float* x) {
    x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y);
    x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
  }
  __device__ static uint4 pack(const float* x) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
  }
  __device__ static constexpr std::uint32_t masked() { return 0xFF800000u; }
};

template <>
struct Vector<__nv_bfloat16> {
  static constexpr int kElements = 8;
  __device__ static void unpack(uint4 v, float* x) {
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
  __device__ static uint4 pack(const float* x) {
    return make_uint4(ptx::pack_bf16x2(x[0], x[1]), ptx::pack_bf16x2(x[2], x[3]), ptx::pack_bf16x2(x[4], x[5]),
                      ptx::pack_bf16x2(x[6], x[7]));
  }
  __device__ static constexpr std::uint32_t masked() { return 0xFF80FF80u; }
};

template <>
struct Vector<__half> {
  static constexpr int kElements = 8;
  __device__ static void unpack(uint4 v, float* x) {
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
  __device__ static uint4 pack(const float* x) {
    return make_uint4(ptx::pack_half2(x[0], x[1]), ptx::pack_half2(x[2], x[3]), ptx::pack_half2(x[4], x[5]),
                      ptx::pack_half2(x[6], x[7]));
  }
  __device__ static constexpr std::uint32_t masked() { return 0xFC00FC00u; }
};

// The reference that exponents are taken against: the row's maximum, or 0 in a row that sees nothing. It is
// subtracted before the change of base: a fused multiply-add would be off by the rounding of a huge reference.
__device__ __forceinline__ float reference_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

__device__ __forceinline__ void store_lse(const SoftmaxParams& p, const RowSegment& segment, float maximum, float sum) {
  if (p.lse == nullptr || segment.row >= p.walk.n_q) return;
  p.lse[segment.batch * p.lse_stride[0] + segment.head * p.lse_stride[1] + segment.row * p.lse_stride[2]] =
      sum == 0.0f ? -INFINITY : maximum + logf(sum);
}

// CTAs start in order and take the rows from the last to the first: what qk_prune wrote last is still in the L2 cache,
// and so will be what pv_sparse reads first.
__device__ __forceinline__ std::int64_t backward_cta() {
  return static_cast<std::int64_t>(gridDim.x) - 1 - static_cast<std::int64_t>(blockIdx.x);
}

// `lanes` consecutive lanes per row; lanes * kVectors vectors must hold the longest row.
template <typename Element, int kVectors>
__global__ void __launch_bounds__(kSoftmaxThreads)
    softmax_registers(const __grid_constant__ SoftmaxParams p, int lanes) {
  using V = Vector<Element>;
  const std::int64_t rows = p.matrices * p.matrix.rows;
  std::int64_t index = (backward_cta() * kSoftmaxThreads + threadIdx.x) / static_cast<unsigned>(lanes);
  const bool exists = index < rows;  // a warp's last lanes may have no row; they still take part in the shuffles
  if (!exists) index = rows - 1;
  const RowSegment segment = row_segment<Element>(p, index);
  const int lane = static_cast<int>(threadIdx.x) % lanes;

  uint4 raw[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * lanes + lane;
    const std::uint32_t masked = V::masked();
    raw[i] =
        at < segment.count ? ptx::load_streaming(segment.vectors + at) : make_uint4(masked, masked, masked, masked);
  }
  float x[kVectors][V::kElements];
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    V::unpack(raw[i], x[i]);
#pragma unroll
    for (float value : x[i]) maximum = fmaxf(maximum, value);
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, offset));
  }
  const float reference = reference_of(maximum);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (float& value : x[i]) {
      value = ptx::exp2_approx((value - reference) * kLog2E);
      sum += value;
    }
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * lanes + lane;
#pragma unroll
    for (float& value : x[i]) value *= inverse;
    if (exists && at < segment.count) segment.vectors[at] = V::pack(x[i]);
  }
  if (exists && lane == 0) store_lse(p, segment, maximum, sum);
}

// Sum or maximum over a CTA; every thread receives it. scratch: one float per warp. The first barrier ends the reads of
// the previous reduction, the second publishes the warps' partial results.
template <typename Combine>
__device__ __forceinline__ float reduce_cta(float value, float* scratch, Combine combine) {
  for (int offset = 16; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(~0u, value, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[0];
  for (int warp = 1; warp < kSoftmaxRowThreads / 32; ++warp) value = combine(value, scratch[warp]);
  return value;
}

// cached_vectors: how many vectors of a row fit in the CTA's shared memory; a longer row is read three times.
template <typename Element>
__global__ void __launch_bounds__(kSoftmaxRowThreads)
    softmax_shared(const __grid_constant__ SoftmaxParams p, int cached_vectors) {
  using V = Vector<Element>;
  DSPATTN_ALIGNED_SHARED(uint4, sRow, 16);
  __shared__ float scratch[kSoftmaxRowThreads / 32];
  const RowSegment segment = row_segment<Element>(p, backward_cta());
  const bool cached = segment.count <= cached_vectors;
  const uint4* source = cached ? sRow : segment.vectors;
  float x[V::kElements];

  float maximum = -INFINITY;
  for (int i = static_cast<int>(threadIdx.x); i < segment.count; i += kSoftmaxRowThreads) {
    const uint4 vector = segment.vectors[i];
    if (cached) sRow[i] = vector;  // read back by this thread only
    V::unpack(vector, x);
    for (const float value : x) maximum = fmaxf(maximum, value);
  }
  maximum = reduce_cta(maximum, scratch, [](float a, float b) { return fmaxf(a, b); });
  const float reference = reference_of(maximum);
  float sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < segment.count; i += kSoftmaxRowThreads) {
    V::unpack(source[i], x);
    for (const float value : x) sum += ptx::exp2_approx((value - reference) * kLog2E);
  }
  sum = reduce_cta(sum, scratch, [](float a, float b) { return a + b; });
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int i = static_cast<int>(threadIdx.x); i < segment.count; i += kSoftmaxRowThreads) {
    V::unpack(source[i], x);
    for (float& value : x) value = ptx::exp2_approx((value - reference) * kLog2E) * inverse;
    segment.vectors[i] = V::pack(x);
  }
  if (threadIdx.x == 0) store_lse(p, segment, maximum, sum);
}

}  // namespace dspattn::cuda::pipeline
