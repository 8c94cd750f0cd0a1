// Bulk copies, emulated: they happen at any time until they are waited for.
#pragma once

#include <cstdint>

#include "emulator/copy_engine.h"
#include "emulator/machine.h"

namespace dspattn::cuda::ptx {

inline void tma_load_4d(std::uint32_t destination, const void* map, std::uint32_t barrier, int c0, int c1, int c2,
                        int c3) {
  emulator::load_box(destination, map, barrier, {c0, c1, c2, c3, 0}, 4);
}
inline void tma_load_5d(std::uint32_t destination, const void* map, std::uint32_t barrier, int c0, int c1, int c2,
                        int c3, int c4) {
  emulator::load_box(destination, map, barrier, {c0, c1, c2, c3, c4}, 5);
}
// To the same place in every block of the cluster that has a bit in `blocks`.
inline void tma_load_5d_multicast(std::uint32_t destination, const void* map, std::uint32_t barrier, int c0, int c1,
                                  int c2, int c3, int c4, std::uint16_t blocks) {
  for (std::uint32_t block = 0; blocks >> block != 0; ++block) {
    if ((blocks >> block & 1) == 0) continue;
    emulator::load_box(emulator::in_block(destination, block), map, emulator::in_block(barrier, block),
                       {c0, c1, c2, c3, c4}, 5);
  }
}
inline void tma_store_4d(const void* map, std::uint32_t source, int c0, int c1, int c2, int c3) {
  emulator::store_box(map, source, {c0, c1, c2, c3, 0}, 4);
}
inline void tma_store_commit() {}
inline void tma_store_wait_read() { emulator::await_stores(); }
inline void bulk_load(std::uint32_t destination, const void* source, int bytes, std::uint32_t barrier) {
  emulator::load_bytes(destination, source, bytes, barrier);
}

}  // namespace dspattn::cuda::ptx
