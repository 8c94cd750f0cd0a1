// Arithmetic on single fp32 values. One instruction per function on the device; plain C++ with the same result on the
// host, so that what is built from these can be tested where there is no GPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "dspattn/pattern.h"

namespace dspattn::cuda::ptx {

// The larger; NaN if either is NaN.
DSPATTN_HOST_DEVICE inline float max_nan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  if (std::isnan(a) || std::isnan(b)) return std::nanf("");
  return a >= b ? a : b;
#endif
}

// All ones where a > b, else 0; 0 when either is NaN.
DSPATTN_HOST_DEVICE inline std::uint32_t greater(float a, float b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("set.gt.u32.f32 %0, %1, %2;" : "=r"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b ? ~0u : 0u;
#endif
}

// For a tensor core that drops the 13 bits below tf32's mantissa: the nearest tf32, ties away from zero. Three
// instructions where round_tf32 takes five; a NaN is left as it is, for one of all ones would turn into a zero.
DSPATTN_HOST_DEVICE inline std::uint32_t nearest_tf32(float x) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("{.reg .pred p; setp.eq.f32 p, %1, %1; mov.b32 %0, %1; @p add.u32 %0, %0, 0x1000;}" : "=r"(result) : "f"(x));
  return result;
#else
  return std::bit_cast<std::uint32_t>(x) + (std::isnan(x) ? 0u : 0x1000u);
#endif
}

// To the nearest tf32, ties to even, the bits below cleared: what TMA does with fp32 under a tf32 map.
DSPATTN_HOST_DEVICE inline std::uint32_t round_tf32(float x) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
  return result;
#else
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return std::isfinite(x) ? (bits + 0xFFFu + (bits >> 13 & 1u)) & 0xFFFFE000u : bits;
#endif
}

}  // namespace dspattn::cuda::ptx
