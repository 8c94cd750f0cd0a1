// Two numbers in a word, as kernels hold them.
#pragma once

#include <cstdint>

#include "core/half.h"

namespace dspattn::cuda::tile {

inline std::uint32_t packed(float low, float high) {
  return core::encode_f16(low) | static_cast<std::uint32_t>(core::encode_f16(high)) << 16;
}

}  // namespace dspattn::cuda::tile
