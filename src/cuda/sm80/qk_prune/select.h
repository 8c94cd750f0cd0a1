// The pruning epilogue's arithmetic, on what one lane holds of 16 rows of a score tile: accumulator rows g and g+8 by
// a run of consecutive places. Results: the kept scores, 16 bytes a row, and one 16-bit metadata
// block a row, the blocks of rows g and g+8 joined in a word as mma.sp wants them.
//
// 16-bit types: a pair of rows is rounded to fp16x2 once; compare, select and encode work on both rows at a time. The
// codes are those of the PTX ISA: index of the first kept element in bits 1:0, of the second in bits 3:2.
#pragma once

#include <cstdint>

#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::sm80 {

// Per bit: mask ? yes : no. One LOP3.
__device__ __forceinline__ std::uint32_t choose_bits(std::uint32_t mask, std::uint32_t yes, std::uint32_t no) {
  return (mask & yes) | (~mask & no);
}

// Nibble j of each half from plane j.
__device__ __forceinline__ std::uint32_t join_nibbles(const std::uint32_t (&planes)[4]) {
  const std::uint32_t low = choose_bits(0x000F000Fu, planes[0], planes[1]);
  const std::uint32_t high = choose_bits(0x0F000F00u, planes[2], planes[3]);
  return choose_bits(0x00FF00FFu, low, high);
}

inline constexpr std::uint32_t kNegativeInfinityHalf2 = 0xFC00FC00u;

// Two of each four: keys[4j .. 4j+3] are group j. Ties keep the lower index; a NaN is kept.
__device__ __forceinline__ std::uint32_t keep_two_of_four(const std::uint32_t (&keys)[16], std::uint32_t (&first)[4],
                                                          std::uint32_t (&second)[4]) {
  std::uint32_t front[4], back[4], odd_first[4], odd_second[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t a = keys[4 * j], b = keys[4 * j + 1], c = keys[4 * j + 2], d = keys[4 * j + 3];
    const std::uint32_t larger_ab = ptx::max_half2_nan(a, b);
    const std::uint32_t smaller_ab = ptx::min_half2_nan(a, b);
    const std::uint32_t larger_cd = ptx::max_half2_nan(c, d);
    const std::uint32_t smaller_cd = ptx::min_half2_nan(c, d);
    front[j] = ptx::greater_equal_half2(smaller_ab, larger_cd);  // both of a, b stay
    back[j] = ptx::greater_half2(smaller_cd, larger_ab);         // both of c, d stay
    odd_first[j] = ptx::greater_half2(b, a);
    odd_second[j] = ptx::greater_half2(d, c);
    first[j] = choose_bits(front[j], a, choose_bits(back[j], c, larger_ab));
    second[j] = choose_bits(front[j], b, choose_bits(back[j], d, larger_cd));
  }
  const std::uint32_t f = join_nibbles(front), k = join_nibbles(back);
  const std::uint32_t o = join_nibbles(odd_first), q = join_nibbles(odd_second);
  return (o & ~f & ~k & 0x11111111u) | (k & 0x22222222u) | ((q | f | k) & 0x44444444u) | (~f & 0x88888888u);
}

// One of each two, written as two of four: a pair's kept element takes its half of the code.
__device__ __forceinline__ std::uint32_t keep_one_of_two(const std::uint32_t (&keys)[16], std::uint32_t (&first)[4],
                                                         std::uint32_t (&second)[4]) {
  std::uint32_t odd_first[4], odd_second[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t a = keys[4 * j], b = keys[4 * j + 1], c = keys[4 * j + 2], d = keys[4 * j + 3];
    first[j] = ptx::max_half2_nan(a, b);
    second[j] = ptx::max_half2_nan(c, d);
    odd_first[j] = ptx::greater_half2(b, a);
    odd_second[j] = ptx::greater_half2(d, c);
  }
  return (join_nibbles(odd_first) & 0x11111111u) | (join_nibbles(odd_second) & 0x44444444u) | 0x88888888u;
}

// The kept keys of rows g (low halves) and g+8 (high halves) as stored scores.
struct KeptPair {
  std::uint32_t row;        // row g: first, second
  std::uint32_t row_below;  // row g+8
};

template <typename Element>
__device__ __forceinline__ KeptPair stored_scores(std::uint32_t first, std::uint32_t second, float scale);

template <>
__device__ __forceinline__ KeptPair stored_scores<__nv_bfloat16>(std::uint32_t first, std::uint32_t second,
                                                                 float scale) {
  const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&first));
  const float2 s = __half22float2(*reinterpret_cast<const __half2*>(&second));
  return {ptx::pack_bf16x2(f.x * scale, s.x * scale), ptx::pack_bf16x2(f.y * scale, s.y * scale)};
}

// Clamped to the finite fp16: +inf would make its row NaN, -inf would mask. What is masked already (-inf) stays.
__device__ __forceinline__ float stored_score_f16(float key, float scale) {
  constexpr float kLargest = 65504.0f;
  const float score = key * scale;
  const float clamped = score < -kLargest ? -kLargest : (score > kLargest ? kLargest : score);  // NaN stays
  return key == -INFINITY ? key : clamped;
}

template <>
__device__ __forceinline__ KeptPair stored_scores<__half>(std::uint32_t first, std::uint32_t second, float scale) {
  const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&first));
  const float2 s = __half22float2(*reinterpret_cast<const __half2*>(&second));
  return {ptx::pack_half2(stored_score_f16(f.x, scale), stored_score_f16(s.x, scale)),
          ptx::pack_half2(stored_score_f16(f.y, scale), stored_score_f16(s.y, scale))};
}

}  // namespace dspattn::cuda::sm80
