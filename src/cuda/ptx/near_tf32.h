// How fp32 becomes an operand of a tensor core that drops the 13 bits below tf32's mantissa, in one instruction.
#pragma once

#include <bit>
#include <cstdint>

#include "dspattn/pattern.h"

namespace dspattn::cuda::ptx {

// x times 1 + 2^-11. What is dropped of that takes it back to x if x is a tf32 number, and elsewhere to no further than
// 2^-11 of x, as far as the nearest (nearest_tf32, two instructions); on average it is 2^-13 too large. NaN and
// infinities stay what they are.
DSPATTN_HOST_DEVICE inline std::uint32_t near_tf32(float x) {
  constexpr float kUp = 1 + 0x1p-11f;
#if defined(__CUDA_ARCH__)
  return __float_as_uint(__fmul_rn(x, kUp));
#else
  return std::bit_cast<std::uint32_t>(x * kUp);
#endif
}

}  // namespace dspattn::cuda::ptx
