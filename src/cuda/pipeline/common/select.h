// The pruning epilogue's arithmetic, on what one lane holds of 16 rows of a score tile: accumulator rows g and g+8 by
// a run of consecutive places. Results: the kept scores, 16 bytes a row, and one 16-bit metadata
// block a row, the blocks of rows g and g+8 joined in a word as mma.sp wants them.
//
// 16-bit types: a pair of rows is rounded to fp16x2 once; compare, select and encode work on both rows at a time. The
// codes are those of the PTX ISA: index of the first kept element in bits 1:0, of the second in bits 3:2.
#pragma once

#include <cstdint>

#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::pipeline {

// Per bit: mask ? yes : no. One LOP3.
__device__ __forceinline__ std::uint32_t choose_bits(std::uint32_t mask, std::uint32_t yes, std::uint32_t no) {
  return (mask & yes) | (~mask & no);
}

inline constexpr std::uint32_t kNegativeInfinityHalf2 = 0xFC00FC00u;

// Codes are put together as fp16 numbers, small integers that are exact: that is work for the FMA pipe, where bits
// would be for the ALU, which selection keeps busy. Of codes 0 and 1, or 2 and 3, of four groups:
__device__ __forceinline__ __half2 join_codes(__half2 low, __half2 high) {
  // From 1024 on an fp16's last eight bits are its integer part's.
  return __hadd2(__hfma2(high, __float2half2_rn(16.0f), __float2half2_rn(1024.0f)), low);
}

// The metadata word of four groups: bits 7:0 and 23:16 of either.
__device__ __forceinline__ std::uint32_t metadata_of(__half2 first, __half2 second) {
  return __byte_perm(*reinterpret_cast<const unsigned*>(&first), *reinterpret_cast<const unsigned*>(&second), 0x6240);
}

// 1 where b > a: of the pair's elements the second is kept.
__device__ __forceinline__ __half2 is_second(std::uint32_t a, std::uint32_t b) {
  return __hgt2(*reinterpret_cast<const __half2*>(&b), *reinterpret_cast<const __half2*>(&a));
}

// The code of a group that keeps one of either pair: 8 + odd_first + 4 odd_second.
__device__ __forceinline__ __half2 code_of_pairs(__half2 odd_first, __half2 odd_second) {
  return __hadd2(__hfma2(odd_second, __float2half2_rn(4.0f), __float2half2_rn(8.0f)), odd_first);
}

// Two of each four: keys[4j .. 4j+3] are group j. Ties keep the lower index; a NaN is kept.
__device__ __forceinline__ std::uint32_t keep_two_of_four(const std::uint32_t (&keys)[16], std::uint32_t (&first)[4],
                                                          std::uint32_t (&second)[4]) {
  constexpr std::uint32_t kFrontCode = 0x44004400u, kBackCode = 0x4B004B00u;  // 4 and 14
  __half2 codes[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t a = keys[4 * j], b = keys[4 * j + 1], c = keys[4 * j + 2], d = keys[4 * j + 3];
    const std::uint32_t larger_ab = ptx::max_half2_nan(a, b);
    const std::uint32_t smaller_ab = ptx::min_half2_nan(a, b);
    const std::uint32_t larger_cd = ptx::max_half2_nan(c, d);
    const std::uint32_t smaller_cd = ptx::min_half2_nan(c, d);
    const std::uint32_t front = ptx::greater_equal_half2(smaller_ab, larger_cd);  // both of a, b stay
    const std::uint32_t back = ptx::greater_half2(smaller_cd, larger_ab);         // both of c, d stay
    const __half2 pairs = code_of_pairs(is_second(a, b), is_second(c, d));
    const std::uint32_t code =
        choose_bits(front, kFrontCode, choose_bits(back, kBackCode, *reinterpret_cast<const std::uint32_t*>(&pairs)));
    codes[j] = *reinterpret_cast<const __half2*>(&code);
    first[j] = choose_bits(front, a, choose_bits(back, c, larger_ab));
    second[j] = choose_bits(front, b, choose_bits(back, d, larger_cd));
  }
  return metadata_of(join_codes(codes[0], codes[1]), join_codes(codes[2], codes[3]));
}

// One of each two, written as two of four: a pair's kept element takes its half of the code.
__device__ __forceinline__ std::uint32_t keep_one_of_two(const std::uint32_t (&keys)[16], std::uint32_t (&first)[4],
                                                         std::uint32_t (&second)[4]) {
  __half2 codes[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t a = keys[4 * j], b = keys[4 * j + 1], c = keys[4 * j + 2], d = keys[4 * j + 3];
    first[j] = ptx::max_half2_nan(a, b);
    second[j] = ptx::max_half2_nan(c, d);
    codes[j] = code_of_pairs(is_second(a, b), is_second(c, d));
  }
  return metadata_of(join_codes(codes[0], codes[1]), join_codes(codes[2], codes[3]));
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

}  // namespace dspattn::cuda::pipeline
