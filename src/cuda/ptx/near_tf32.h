// How fp32 becomes an operand of a tensor core that drops the 13 bits below tf32's mantissa, in one instruction.
#pragma once

#include <bit>
#include <cstdint>

#include "dspattn/pattern.h"

namespace dspattn::cuda::ptx {

// x times 1 + 0.69 * 2^-11. What is left of that without those bits is x again if x is a tf32 number. Other numbers are
// off by up to 1.31 times what the nearest may be (2^-11 of x; nearest_tf32 takes two instructions), and on average by
// nothing: what is dropped is half a unit on average, and 0.69 is ln 2, the mean of 1 / m over mantissas m from 1 to 2.
// NaN and infinities stay what they are.
DSPATTN_HOST_DEVICE inline std::uint32_t near_tf32(float x) {
  constexpr float kUp = 1 + 0.69f * 0x1p-11f;
#if defined(__CUDA_ARCH__)
  return __float_as_uint(__fmul_rn(x, kUp));
#else
  return std::bit_cast<std::uint32_t>(x * kUp);
#endif
}

}  // namespace dspattn::cuda::ptx
