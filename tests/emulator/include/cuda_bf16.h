// bf16 as device code has it, for the emulated device.
#pragma once

#include "core/half.h"
#include "emulator/device.h"

struct __nv_bfloat16 {
  std::uint16_t bits;

  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) : bits(dspattn::core::encode_bf16(x)) {}
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) { return dspattn::core::decode_bf16(x.bits); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {__nv_bfloat16(x), __nv_bfloat16(x)}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  // 16 bits of a product are exact in fp32, but for subnormal ones.
  const auto one = [](__nv_bfloat16 x, __nv_bfloat16 y) {
    return __nv_bfloat16(__bfloat162float(x) * __bfloat162float(y));
  };
  return {one(a.x, b.x), one(a.y, b.y)};
}
