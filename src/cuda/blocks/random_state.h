// What dropout's random numbers are drawn from: two numbers that the host gives, or the same in device memory, which a
// CUDA graph finds changed at each replay.
#pragma once

#include <cstdint>

#include "core/dropout.h"

namespace dspattn::cuda::blocks {

struct RandomState {
  std::uint64_t seed = 0, offset = 0;
  const std::int32_t* words = nullptr;  // [4]: low and high words of the two, read in place of them
  std::int64_t stride = 0;              // from word to word

  // Of a row of scores of a sequence's head.
  DSPATTN_HOST_DEVICE core::DropoutRow row(int sequence, int head, int position) const {
    const auto word = [&](int i) { return std::uint64_t{static_cast<std::uint32_t>(words[i * stride])}; };
    const bool in_memory = words != nullptr;
    return core::DropoutRow::of(in_memory ? word(0) | word(1) << 32 : seed,
                                in_memory ? word(2) | word(3) << 32 : offset, static_cast<std::uint32_t>(sequence),
                                static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(position));
  }
};

}  // namespace dspattn::cuda::blocks
