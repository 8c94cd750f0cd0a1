// Loads mask tensors to shared memory: for every key tile, and for one consumer warpgroup after the other, a block of
// the bias and a block of the boolean mask, where there are such, through a ring of as many blocks as fit.
//
// By the warps that do not drive the copies of K and V: one thread asks TMA, or where that cannot read the
// tensors all threads of these warps copy.
#pragma once

#include <cstdint>

#include "cuda/blocks/masks.h"
#include "cuda/blocks/work.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/tile/mask_map.h"

namespace dspattn::cuda::blocks {

// The producer's last three warps load them.
inline constexpr int kMaskWarps = 3;
inline constexpr int kMaskThreads = 32 * kMaskWarps;

// The ring in shared memory. kBytes: 0 where there is none.
template <int kBytes, int kConsumers>
struct MaskBlocks {
  static constexpr int kSlots = 4;  // at most
  alignas(1024) std::uint8_t blocks[kBytes];
  std::uint64_t full[kConsumers * kSlots], empty[kSlots];

  // For one thread, before anybody waits.
  __device__ __forceinline__ void init_barriers(bool by_tma) {
    for (std::uint64_t& barrier : full) ptx::mbarrier_init(ptx::shared_address(&barrier), by_tma ? 1 : kMaskThreads);
    for (std::uint64_t& barrier : empty) ptx::mbarrier_init(ptx::shared_address(&barrier), by_tma ? 4 : 128);
  }
};
template <int kConsumers>
struct MaskBlocks<0, kConsumers> {};

// How many blocks each warpgroup needs for a tile.
__device__ __forceinline__ int masks_per_tile(const MaskParams& params) {
  return (params.bias.data != nullptr ? 1 : 0) + (params.allowed.data != nullptr ? 1 : 0);
}

// Where block `which` of a warpgroup for the tiles-th tile of this CTA stands in the ring. Warpgroups share
// the ring's slots, but each has its own barriers for what has arrived: it does not see the phases of the others'
// blocks, and a parity tells only neighbouring phases apart. The ring never holds more blocks than a warpgroup has
// barriers.
template <typename C>
struct MaskSlot {
  std::uint32_t block, full, empty;
  int full_parity, empty_parity;

  __device__ __forceinline__ MaskSlot(const MaskParams& params, const MaskBlocks<C::kMaskBytes, C::kConsumers>& ring,
                                      int tiles, int warpgroup, int which) {
    constexpr int kSlots = MaskBlocks<C::kMaskBytes, C::kConsumers>::kSlots;
    const int masks = masks_per_tile(params);
    const int own = tiles * masks + which;  // blocks of this warpgroup before it
    const int number = (tiles * C::kConsumers + warpgroup) * masks + which;
    const int shift = C::mask_slots_log2(params.bytes);
    const auto slot = static_cast<std::uint32_t>(number & ((1 << shift) - 1));
    block = ptx::shared_address(ring.blocks) + slot * static_cast<std::uint32_t>(tile::mask_block_bytes(params.bytes));
    empty = ptx::shared_address(ring.empty) + 8 * slot;
    empty_parity = number >> shift & 1;
    full = ptx::shared_address(ring.full) + 8 * static_cast<std::uint32_t>(kSlots * warpgroup + own % kSlots);
    full_parity = own / kSlots & 1;
  }
};

// A block as copying threads see it. Rows past the last repeat it: their results are not stored. Keys past the last are
// masked anyway, so what stands there does not matter.
struct MaskSource {
  const std::uint8_t* data;  // of the block's first key in the sequence's row 0
  std::int64_t row_bytes;
  int key_bytes, element_bytes;
  int first_row, last_row;  // of the block, and of the sequence
  int bytes;                // of a row from the block's first key on; at most two blocks'

  __device__ __forceinline__ const std::uint8_t* row(int in_block) const {
    return data + min(first_row + in_block, last_row) * row_bytes;
  }
};

// Each of the next three copies one panel: 128 bytes of keys from byte `begin` of every row on, a row to a warp. `warp`
// counts the copying ones.

// Rows at multiples of 4 bytes. Does not wait for the copies.
__device__ __forceinline__ void copy_mask_words(std::uint32_t panel, const MaskSource& source, int begin, int warp,
                                                int lane) {
  const int present = max(0, min(source.bytes - begin - 4 * lane, 4));
  const std::uint8_t* from = source.row(warp) + (present > 0 ? begin + 4 * lane : 0);
#pragma unroll 2
  for (int row = warp; row < tile::kMaskRows; row += kMaskWarps) {
    ptx::copy_async_4(panel + static_cast<std::uint32_t>(tile::mask_offset(row, 4 * lane, 1)), from, present);
    if (source.first_row + row + kMaskWarps <= source.last_row) from += kMaskWarps * source.row_bytes;
  }
}

// Rows at any byte that do not end here: each word is put together from the two aligned ones it lies in.
__device__ __forceinline__ void copy_mask_shifted(std::uint32_t panel, const MaskSource& source, int begin, int warp,
                                                  int lane) {
  constexpr int kBatch = 8;  // rows loaded before the first is stored
#pragma unroll 1
  for (int first = warp; first < tile::kMaskRows; first += kBatch * kMaskWarps) {
    std::uint32_t words[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::uint8_t* from = source.row(first + i * kMaskWarps) + begin + 4 * lane;
      const auto* aligned = reinterpret_cast<const std::uint32_t*>(from - (reinterpret_cast<std::uintptr_t>(from) & 3));
      words[i][0] = aligned[0];
      words[i][1] = aligned[1];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kMaskWarps;
      const auto from = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(source.row(row)));
      if (row < tile::kMaskRows) {
        ptx::store_shared(panel + static_cast<std::uint32_t>(tile::mask_offset(row, 4 * lane, 1)),
                          __funnelshift_r(words[i][0], words[i][1], 8 * (from & 3)));
      }
    }
  }
}

// Rows that end here, and keys that are no neighbours: byte by byte.
__device__ __forceinline__ void copy_mask_bytes(std::uint32_t panel, const MaskSource& source, int begin, int warp,
                                                int lane) {
  int offsets[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int byte = begin + 4 * lane + i;
    offsets[i] = byte / source.element_bytes * source.key_bytes + byte % source.element_bytes;
  }
#pragma unroll 1
  for (int row = warp; row < tile::kMaskRows; row += kMaskWarps) {
    const std::uint8_t* from = source.row(row);
    std::uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (begin + 4 * lane + i < source.bytes) word |= static_cast<std::uint32_t>(from[offsets[i]]) << (8 * i);
    }
    ptx::store_shared(panel + static_cast<std::uint32_t>(tile::mask_offset(row, 4 * lane, 1)), word);
  }
}

template <typename C>
__device__ __forceinline__ void load_mask_block(bool by_tma, const MaskTensor& tensor, const CUtensorMap& map,
                                                int element_bytes, const Work& work, int row, int first_key,
                                                int present, const MaskSlot<C>& slot) {
  if (by_tma) {
    if (threadIdx.x == 32) {
      ptx::mbarrier_wait(slot.empty, slot.empty_parity ^ 1);
      ptx::mbarrier_arrive_expect(slot.full, tile::mask_block_bytes(element_bytes));
#pragma unroll 1
      for (int panel = 0; panel < element_bytes; ++panel) {
        ptx::tma_load_4d(slot.block + static_cast<std::uint32_t>(panel * tile::kMaskPanelBytes), &map, slot.full,
                         first_key + panel * 128 / element_bytes, row, tensor.head_stride != 0 ? work.head : 0,
                         tensor.batch_stride != 0 ? work.sequence : 0);
      }
    }
    __syncwarp();  // the asking thread's warp stays together
    return;
  }
  ptx::mbarrier_wait(slot.empty, slot.empty_parity ^ 1);
  const std::int64_t offset =
      work.sequence * tensor.batch_stride + work.head * tensor.head_stride + first_key * tensor.key_stride;
  const MaskSource source{static_cast<const std::uint8_t*>(tensor.data) + offset * element_bytes,
                          tensor.row_stride * element_bytes,
                          static_cast<int>(tensor.key_stride) * element_bytes,
                          element_bytes,
                          row,
                          work.rows - 1,
                          min(present, 2 * tile::kBlockKeys) * element_bytes};
  const int warp = static_cast<int>(threadIdx.x) / 32 - 1;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool words =
      tensor.key_stride == 1 && (reinterpret_cast<std::uintptr_t>(source.data) % 4 | source.row_bytes % 4) == 0;
#pragma unroll 1
  for (int i = 0; i < element_bytes; ++i) {
    const std::uint32_t panel = slot.block + static_cast<std::uint32_t>(i * tile::kMaskPanelBytes);
    if (words) {
      copy_mask_words(panel, source, 128 * i, warp, lane);
    } else if (tensor.key_stride == 1 && source.bytes >= 128 * i + 132) {
      copy_mask_shifted(panel, source, 128 * i, warp, lane);
    } else {
      copy_mask_bytes(panel, source, 128 * i, warp, lane);
    }
  }
  if (words) {
    ptx::copy_async_arrive(slot.full);
  } else {
    ptx::mbarrier_arrive(slot.full);
  }
}

// All warpgroups' blocks for this CTA's tiles-th tile: of the 128 keys from first_key on, `present` of which
// exist.
template <typename C>
__device__ __forceinline__ void load_mask_blocks(const MaskParams& params,
                                                 const MaskBlocks<C::kMaskBytes, C::kConsumers>& ring, const Work& work,
                                                 int first_key, int present, int tiles) {
  const int masks = masks_per_tile(params);
#pragma unroll 1
  for (int i = 0; i < C::kConsumers * masks; ++i) {
    const int warpgroup = i / masks;
    const int which = i - warpgroup * masks;
    const bool bias = params.bias.data != nullptr && which == 0;
    load_mask_block<C>(params.by_tma != 0, bias ? params.bias : params.allowed,
                       bias ? params.bias_map : params.allowed_map, bias ? params.bias_bytes : 1, work,
                       work.row_begin + warpgroup * tile::kMaskRows, first_key, present,
                       MaskSlot<C>(params, ring, tiles, warpgroup, which));
  }
}

}  // namespace dspattn::cuda::blocks
