// Where a block of a mask tensor (64 query rows x 128 keys) lies in shared memory, and where a lane finds its keys
// there.
//
// The block is cut into panels of 128 bytes of keys, each of 64 rows in the 128-byte swizzle, as TMA writes
// them. The parts of a key's index that come from its lane, its group block and its element (tile/key_map.h) occupy
// different bits, so that a lane gets from one key to another by exclusive or.
#pragma once

#include <cstdint>

#include "cuda/tile/key_map.h"

namespace dspattn::cuda::tile {

inline constexpr int kMaskRows = 64;  // of one consumer warpgroup
inline constexpr int kMaskPanelBytes = kMaskRows * 128;

DSPATTN_HOST_DEVICE constexpr int mask_block_bytes(int element_bytes) {
  return kMaskPanelBytes * (kBlockKeys * element_bytes / 128);
}

// Byte offset of a key of the block, `element_bytes` each.
DSPATTN_HOST_DEVICE constexpr int mask_offset(int row, int key, int element_bytes) {
  const int byte = key * element_bytes;
  return (byte >> 7) * kMaskPanelBytes + swizzled_offset(row, (byte & 127) >> 4) + (byte & 15);
}

// Offset of the key `key` further on, where the two have no bit in common: within a panel an exclusive or, of which
// only the swizzled part need be one, so that constants become offsets of a load. May be applied to an address: panels
// are aligned.
DSPATTN_HOST_DEVICE constexpr std::uint32_t mask_moved(std::uint32_t offset, int key, int element_bytes) {
  const auto byte = static_cast<std::uint32_t>(key * element_bytes);
  return (offset ^ (byte & 0x70u)) + (byte >> 7) * kMaskPanelBytes + (byte & 15u);
}

// How a lane's keys lie in a block: runs of neighbours, of 4, 2 or 1. Element i of run r of a group is element
// mask_element(keys, r, i) of the group, and the run's first key that of element r.
DSPATTN_HOST_DEVICE constexpr int mask_run(const KeyMap& keys) {
  return keys.pair_step == 1 ? 4 : keys.half_step == 1 ? 2 : 1;
}
DSPATTN_HOST_DEVICE constexpr int mask_element(const KeyMap& keys, int run, int i) {
  return mask_run(keys) == 4 ? i : mask_run(keys) == 2 ? 2 * i + run : run;
}

}  // namespace dspattn::cuda::tile
