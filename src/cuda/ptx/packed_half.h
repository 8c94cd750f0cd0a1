// Arithmetic on 32-bit words that hold two fp16 (or bf16) values, and the bit operations that go with it. One
// instruction per function on the device; plain C++ with the same result on the host, so that what is built from these
// can be tested where there is no GPU.
#pragma once

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

#include <cmath>
#include <cstdint>

#include "core/half.h"
#include "dspattn/pattern.h"

namespace dspattn::cuda::ptx {

#if !defined(__CUDA_ARCH__)
namespace host {

inline bool is_nan(std::uint16_t x) { return (x & 0x7FFF) > 0x7C00; }

// Applies `operation` to the low and the high halves.
template <typename Operation>
std::uint32_t per_half(std::uint32_t a, std::uint32_t b, Operation operation) {
  const auto low = [](std::uint32_t x) { return static_cast<std::uint16_t>(x & 0xFFFF); };
  const auto high = [](std::uint32_t x) { return static_cast<std::uint16_t>(x >> 16); };
  return static_cast<std::uint32_t>(operation(low(a), low(b))) | static_cast<std::uint32_t>(operation(high(a), high(b)))
                                                                     << 16;
}

inline std::uint32_t pack(std::uint16_t low, std::uint16_t high) {
  return low | static_cast<std::uint32_t>(high) << 16;
}

// A number that compares as the fp16 value does, which is no NaN; selection on the host is comparisons for the most
// part.
inline int rank(std::uint16_t x) { return (x & 0x8000) != 0 ? -(x & 0x7FFF) : x; }

inline std::uint16_t pick(std::uint16_t a, std::uint16_t b, bool larger) {
  if (is_nan(a) || is_nan(b)) return 0x7FFF;
  return (larger ? rank(a) >= rank(b) : rank(a) <= rank(b)) ? a : b;
}

inline bool greater(std::uint16_t a, std::uint16_t b) { return !is_nan(a) && !is_nan(b) && rank(a) > rank(b); }
inline bool greater_equal(std::uint16_t a, std::uint16_t b) { return !is_nan(a) && !is_nan(b) && rank(a) >= rank(b); }

}  // namespace host
#endif

// Larger and smaller of each half; NaN if either is NaN.
DSPATTN_HOST_DEVICE inline std::uint32_t max_f16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return host::per_half(a, b, [](std::uint16_t x, std::uint16_t y) { return host::pick(x, y, true); });
#endif
}

DSPATTN_HOST_DEVICE inline std::uint32_t min_f16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return host::per_half(a, b, [](std::uint16_t x, std::uint16_t y) { return host::pick(x, y, false); });
#endif
}

// 0xFFFF in each half where a > b (a >= b), else 0; false when either is NaN.
DSPATTN_HOST_DEVICE inline std::uint32_t greater_f16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("{set.gt.u32.f16x2 %0, %1, %2;}" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return host::per_half(a, b, [](std::uint16_t x, std::uint16_t y) { return host::greater(x, y) ? 0xFFFF : 0; });
#endif
}

DSPATTN_HOST_DEVICE inline std::uint32_t greater_equal_f16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("{set.ge.u32.f16x2 %0, %1, %2;}" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return host::per_half(a, b, [](std::uint16_t x, std::uint16_t y) { return host::greater_equal(x, y) ? 0xFFFF : 0; });
#endif
}

// 0xFFFF in each half where a >= -b, else 0; false when either is NaN. All bits the other way around where `flip` is
// not 0: that too is one instruction, but for the predicate that it is made from.
DSPATTN_HOST_DEVICE inline std::uint32_t greater_equal_minus_f16x2(std::uint32_t a, std::uint32_t b,
                                                                   std::uint32_t flip) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("{.reg .pred p; .reg .b32 minus_b; setp.ne.b32 p, %3, 0; neg.f16x2 minus_b, %2; "
      "set.ge.xor.u32.f16x2 %0, %1, minus_b, p;}"
      : "=r"(result)
      : "r"(a), "r"(b), "r"(flip));
  return result;
#else
  return greater_equal_f16x2(a, b ^ 0x80008000u) ^ (flip != 0 ? ~0u : 0u);
#endif
}

// Bitwise mask ? a : b.
DSPATTN_HOST_DEVICE inline std::uint32_t bit_select(std::uint32_t mask, std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
  return result;
#else
  return (mask & a) | (~mask & b);
#endif
}

// Any bitwise function of three words: bit (4a + 2b + c) of kTable is its value.
template <int kTable>
DSPATTN_HOST_DEVICE inline std::uint32_t lop3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return result;
#else
  std::uint32_t result = 0;
  for (int row = 0; row < 8; ++row) {
    if (((kTable >> row) & 1) == 0) continue;
    result |= ((row & 4) ? a : ~a) & ((row & 2) ? b : ~b) & ((row & 1) ? c : ~c);
  }
  return result;
#endif
}

DSPATTN_HOST_DEVICE inline std::uint32_t rotate_left(std::uint32_t x, std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_l(x, x, bits);
#else
  bits &= 31;
  return bits == 0 ? x : (x << bits) | (x >> (32 - bits));
#endif
}

// Byte i of the result is byte (selector nibble i) of the eight bytes b:a.
DSPATTN_HOST_DEVICE inline std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, selector);
#else
  const std::uint64_t bytes = (static_cast<std::uint64_t>(b) << 32) | a;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<std::uint32_t>((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 0xFF) << (8 * i);
  }
  return result;
#endif
}

// 0xFFFF in each half where the two are equal, else 0.
DSPATTN_HOST_DEVICE inline std::uint32_t equal_bf16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("{set.eq.u32.bf16x2 %0, %1, %2;}" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return host::per_half(
      a, b, [](std::uint16_t x, std::uint16_t y) { return core::decode_bf16(x) == core::decode_bf16(y) ? 0xFFFF : 0; });
#endif
}
DSPATTN_HOST_DEVICE inline std::uint32_t equal_f16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("{set.eq.u32.f16x2 %0, %1, %2;}" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return host::per_half(
      a, b, [](std::uint16_t x, std::uint16_t y) { return core::decode_f16(x) == core::decode_f16(y) ? 0xFFFF : 0; });
#endif
}

// Two fp32 to one word, nearest even. fp16: clamped to the largest finite value; NaN stays NaN.
DSPATTN_HOST_DEVICE inline std::uint32_t pack_f16x2_clamped(float low, float high) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#else
  const auto clamped = [](float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; };
  return host::pack(core::encode_f16(clamped(low)), core::encode_f16(clamped(high)));
#endif
}
DSPATTN_HOST_DEVICE inline std::uint32_t pack_f16x2(float low, float high) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#else
  return host::pack(core::encode_f16(low), core::encode_f16(high));
#endif
}
DSPATTN_HOST_DEVICE inline std::uint32_t pack_bf16x2(float low, float high) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#else
  return host::pack(core::encode_bf16(low), core::encode_bf16(high));
#endif
}

DSPATTN_HOST_DEVICE inline std::uint32_t multiply_bf16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;  // plus -0, which changes nothing: before Hopper there is no product alone
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));
  return result;
#else
  return host::per_half(a, b, [](std::uint16_t x, std::uint16_t y) {
    return core::encode_bf16(double{core::decode_bf16(x)} * core::decode_bf16(y));
  });
#endif
}
DSPATTN_HOST_DEVICE inline std::uint32_t multiply_f16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return host::per_half(a, b, [](std::uint16_t x, std::uint16_t y) {
    return core::encode_f16(double{core::decode_f16(x)} * core::decode_f16(y));
  });
#endif
}
// a * factor + b, rounded once.
DSPATTN_HOST_DEVICE inline std::uint32_t multiply_add_f16x2(std::uint32_t a, int factor, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  const __half2 result = __hfma2(reinterpret_cast<const __half2&>(a), __float2half2_rn(static_cast<float>(factor)),
                                 reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const std::uint32_t&>(result);
#else
  return host::per_half(a, b, [factor](std::uint16_t x, std::uint16_t y) {
    return core::encode_f16(double{core::decode_f16(x)} * factor + core::decode_f16(y));
  });
#endif
}
// a * b + c, rounded once.
DSPATTN_HOST_DEVICE inline std::uint32_t fma_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  const auto half_of = [&](int shift) {
    const auto value = [shift](std::uint32_t x) {
      return double{core::decode_f16(static_cast<std::uint16_t>(x >> shift))};
    };
    return core::encode_f16(value(a) * value(b) + value(c));
  };
  return host::pack(half_of(0), half_of(16));
#endif
}
// The same, negative results as 0.
DSPATTN_HOST_DEVICE inline std::uint32_t fma_relu_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return max_f16x2(fma_f16x2(a, b, c), 0);
#endif
}
// The same, clamped to 0 to 1; NaN becomes 0.
DSPATTN_HOST_DEVICE inline std::uint32_t fma_sat_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return host::per_half(fma_f16x2(a, b, c), 0, [](std::uint16_t x, std::uint16_t) {
    const float value = core::decode_f16(x);
    return value > 0.0f ? (value < 1.0f ? x : 0x3C00) : 0;  // also of NaN
  });
#endif
}
DSPATTN_HOST_DEVICE inline std::uint32_t add_f16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return host::per_half(a, b, [](std::uint16_t x, std::uint16_t y) {
    return core::encode_f16(double{core::decode_f16(x)} + core::decode_f16(y));
  });
#endif
}
// 0xFFFF in each half where |a| <= b, else 0.
DSPATTN_HOST_DEVICE inline std::uint32_t within_f16x2(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __hle2_mask(__habs2(reinterpret_cast<const __half2&>(a)), reinterpret_cast<const __half2&>(b));
#else
  return host::per_half(a & 0x7FFF7FFFu, b, [](std::uint16_t x, std::uint16_t y) {
    return core::decode_f16(x) <= core::decode_f16(y) ? 0xFFFF : 0;
  });
#endif
}

// The two fp16 halves as fp32.
DSPATTN_HOST_DEVICE inline void unpack_f16x2(std::uint32_t x, float& low, float& high) {
#if defined(__CUDA_ARCH__)
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(x));
#else
  low = core::decode_f16(static_cast<std::uint16_t>(x & 0xFFFF));
  high = core::decode_f16(static_cast<std::uint16_t>(x >> 16));
#endif
}

// 2^x, relative error below 2^-22; subnormal results are 0. Volatile: stays in the order it is written in.
DSPATTN_HOST_DEVICE inline float exp2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  const float result = std::exp2(x);
  return result < 0x1p-126f ? 0.0f : result;
#endif
}

// log2(x) and 1 / x of a normal number, or 0.
DSPATTN_HOST_DEVICE inline float log2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::log2(x);
#endif
}
DSPATTN_HOST_DEVICE inline float reciprocal_fast(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / x;
#endif
}

// 1 / sqrt(x), relative error below 2^-22.
DSPATTN_HOST_DEVICE inline float rsqrt_fast(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / std::sqrt(x);
#endif
}

// 2^x of each half, relative error below 2^-9.9. Volatile: as exp2_fast.
DSPATTN_HOST_DEVICE inline std::uint32_t exp2_f16x2(std::uint32_t x) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm volatile("ex2.approx.f16x2 %0, %1;" : "=r"(result) : "r"(x));
  return result;
#else
  return host::per_half(x, 0, [](std::uint16_t half, std::uint16_t) {
    return core::encode_f16(std::exp2(double{core::decode_f16(half)}));
  });
#endif
}

}  // namespace dspattn::cuda::ptx
