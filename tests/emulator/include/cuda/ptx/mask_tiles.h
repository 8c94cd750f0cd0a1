// In place of src/cuda/ptx/mask_tiles.h.
#pragma once

#include <cstdint>

#include "emulator/copy_engine.h"
#include "emulator/warp_matrix.h"

namespace dspattn::cuda::ptx {

inline void copy_async_8(std::uint32_t destination, const void* source, int bytes) {
  emulator::copy_async(destination, source, bytes, 8);
}

inline void copy_async_8(std::uint32_t destination, const void* source) {
  emulator::copy_async(destination, source, 8, 8);
}

inline void load_transposed_matrices(std::uint32_t address, std::uint32_t (&words)[4]) {
  emulator::load_matrices(words, address, true);
}

template <std::uint32_t kBytes>
std::uint32_t spread_signs(std::uint32_t x) {
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    if ((x >> (8 * (kBytes >> (4 * i) & 3) + 7) & 1) != 0) result |= 0xFFu << (8 * i);
  }
  return result;
}

}  // namespace dspattn::cuda::ptx
