// Chunks of 16 bytes of the inputs on their way to prepared rows: what would spoil products of weights that are 0 is
// taken out of them, what the products' type asks for is done to them.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/near_tf32.h"
#include "cuda/ptx/packed_half.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::general::backward {

template <DType kType>
inline constexpr int kChunk = kType == DType::f32 ? 4 : 8;  // elements of 16 bytes

template <DType kType>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  return kType == DType::bf16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
}

template <DType kType>
__device__ __forceinline__ float element(const void* data, std::int64_t at, bool fp32) {
  if (kType == DType::f32 || fp32) return static_cast<const float*>(data)[at];
  const std::uint32_t bits = static_cast<const std::uint16_t*>(data)[at];
  if constexpr (kType == DType::bf16) return __uint_as_float(bits << 16);
  float low, high;
  ptx::unpack_f16x2(bits, low, high);
  return low;
}

// The largest number of the type; of fp32, the largest that tf32 holds.
template <DType kType>
inline constexpr float kLargest = kType == DType::f32    ? 0x1.ffcp127f
                                  : kType == DType::bf16 ? 0x1.fep127f
                                                         : 65504.0f;

// Whether no number of 16 bytes of memory is NaN or infinite: exponents of all ones, which one more makes a sign.
template <DType kType>
__device__ __forceinline__ bool all_finite(const uint4& x) {
  constexpr std::uint32_t kExponent = kType == DType::f32    ? 0x7F800000u
                                      : kType == DType::bf16 ? 0x7F807F80u
                                                             : 0x7C007C00u;
  constexpr std::uint32_t kOne = kExponent & ~(kExponent << 1);
  constexpr std::uint32_t kSign = kType == DType::f32 ? 0x80000000u : 0x80008000u;
  const auto carry = [](std::uint32_t word) { return (word & kExponent) + kOne; };
  return ((carry(x.x) | carry(x.y) | carry(x.z) | carry(x.w)) & kSign) == 0;
}

// Some elements of a row, from column `column` on; those at and past the end are zeros.
template <DType kType>
struct Chunk {
  float values[kChunk<kType>] = {};

  Chunk() = default;
  __device__ __forceinline__ Chunk(const void* data, std::int64_t offset, int column, int columns, int vector,
                                   bool fp32) {
    if (vector != 0 && column < columns && (kType == DType::f32 || !fp32)) {
      constexpr int kBytes = kType == DType::f32 ? 4 : 2;
      take(*reinterpret_cast<const uint4*>(static_cast<const std::uint8_t*>(data) + (offset + column) * kBytes));
      return;
    }
#pragma unroll
    for (int i = 0; i < kChunk<kType>; ++i) {
      if (column + i < columns) values[i] = element<kType>(data, offset + column + i, fp32);
    }
  }

  // 16 bytes of memory.
  __device__ __forceinline__ explicit Chunk(const uint4& x) { take(x); }
  __device__ __forceinline__ void take(const uint4& x) {
    const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < kChunk<kType>; ++i) {
      if constexpr (kType == DType::f32) {
        values[i] = __uint_as_float(words[i]);
      } else if constexpr (kType == DType::bf16) {
        values[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000u);
      } else {
        float low, high;
        ptx::unpack_f16x2(words[i / 2], low, high);
        values[i] = i % 2 == 0 ? low : high;
      }
    }
  }

  // Of a prepared row: rounded to tf32 where asked for, 16-bit ones times `scale`, given twice in their type.
  __device__ __forceinline__ uint4 prepared(bool tf32, std::uint32_t scale) const {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kType == DType::f32) {
        words[i] = tf32 ? ptx::near_tf32(values[i]) : __float_as_uint(values[i]);
      } else {
        const std::uint32_t pair = pack_pair<kType>(values[2 * i], values[2 * i + 1]);
        words[i] = kType == DType::bf16 ? ptx::multiply_bf16x2(pair, scale) : ptx::multiply_f16x2(pair, scale);
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  __device__ __forceinline__ void store(std::uint8_t* to, bool tf32, std::uint32_t scale) const {
    *reinterpret_cast<uint4*>(to) = prepared(tf32, scale);
  }
  __device__ __forceinline__ void clear_nan() {
#pragma unroll
    for (float& value : values) value = std::isnan(value) ? 0.0f : value;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& value : values) value = 0.0f;
  }
  __device__ __forceinline__ void clean_keys() {
    clear_nan();
    bound_infinite();
  }
  __device__ __forceinline__ void clean_values() {
    clear_nan();
    clear_infinite();
  }

 private:
  // Of V: rows that keep an infinite one are undefined by their D, to others it is nothing.
  __device__ __forceinline__ void clear_infinite() {
#pragma unroll
    for (float& value : values) value = std::isinf(value) ? 0.0f : value;
  }
  // Of K: a row whose score is -inf does not see the key. It may as well see one of no weight.
  __device__ __forceinline__ void bound_infinite() {
#pragma unroll
    for (float& value : values) value = std::isinf(value) ? copysignf(kLargest<kType>, value) : value;
  }
};

// 1 twice.
template <DType kType>
inline constexpr std::uint32_t kOnePair = kType == DType::bf16 ? 0x3F803F80u : 0x3C003C00u;

}  // namespace dspattn::cuda::general::backward
