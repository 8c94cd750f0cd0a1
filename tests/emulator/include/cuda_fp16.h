// fp16 as device code has it, for the emulated device.
#pragma once

#include "core/half.h"
#include "emulator/device.h"

struct __half {
  std::uint16_t bits;

  __half() = default;
  explicit __half(float x) : bits(dspattn::core::encode_f16(x)) {}
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half x) { return dspattn::core::decode_f16(x.bits); }
inline __half __float2half(float x) { return __half(x); }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }

inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  // Rounded to fp32, then to fp16: enough for the small integers that kernels put together this way.
  const auto one = [](__half x, __half y, __half z) {
    return __half(std::fma(__half2float(x), __half2float(y), __half2float(z)));
  };
  return {one(a.x, b.x, c.x), one(a.y, b.y, c.y)};
}
inline __half2 __hadd2(__half2 a, __half2 b) { return __hfma2(a, __float2half2_rn(1.0f), b); }
// 1 where a > b, else 0; 0 when either is NaN.
inline __half2 __hgt2(__half2 a, __half2 b) {
  const auto one = [](__half x, __half y) { return __half(__half2float(x) > __half2float(y) ? 1.0f : 0.0f); };
  return {one(a.x, b.x), one(a.y, b.y)};
}
