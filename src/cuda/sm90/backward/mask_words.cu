#include <cstdint>

#include "cuda/device/device.h"
#include "cuda/ptx/barrier.h"
#include "cuda/sm90/backward/mask_words.h"
#include "cuda/tile/key_row_masks.h"
#include "cuda/tile/key_rows.h"

namespace dspattn::cuda::sm90::backward {
namespace {

constexpr int kPackThreads = 256;                // a word each
constexpr int kRowBytes = tile::kBlockKeys + 4;  // rows of a block begin in different banks

// Four neighbouring keys of a row; those that do not exist are masked.
__device__ __forceinline__ std::uint32_t load_keys(const std::uint8_t* row, std::int64_t stride, int key, int keys,
                                                   bool words) {
  if (words && key + 4 <= keys) return *reinterpret_cast<const std::uint32_t*>(row + key);
  std::uint32_t bytes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (key + i < keys) bytes |= static_cast<std::uint32_t>(row[(key + i) * stride]) << (8 * i);
  }
  return bytes;
}

// One CTA a block of 64 queries by 128 keys, through shared memory.
__global__ void __launch_bounds__(kPackThreads) pack_mask(const __grid_constant__ MaskWordsParams params) {
  alignas(4) __shared__ std::uint8_t block[tile::kMaskTileQueries][kRowBytes];
  const int number = static_cast<int>(blockIdx.x);
  const int plane_row = number / params.key_blocks;
  const int key_block = number - plane_row * params.key_blocks;
  const int plane = plane_row / params.query_tiles;
  const int first_row = (plane_row - plane * params.query_tiles) * tile::kMaskTileQueries;
  const int sequence = plane / params.heads;
  const MaskTensor& mask = params.mask;
  const auto* data = static_cast<const std::uint8_t*>(mask.data) + sequence * mask.batch_stride +
                     (plane - sequence * params.heads) * mask.head_stride;
  const int thread = static_cast<int>(threadIdx.x);
  const int key = 4 * (thread % 32);
#pragma unroll 4
  for (int row = thread / 32; row < tile::kMaskTileQueries; row += kPackThreads / 32) {
    std::uint32_t bytes = 0;
    if (first_row + row < params.rows) {
      bytes = load_keys(data + (first_row + row) * mask.row_stride, mask.key_stride,
                        params.first_key + key_block * tile::kBlockKeys + key, params.keys, params.words != 0);
    }
    *reinterpret_cast<std::uint32_t*>(&block[row][key]) = bytes;
  }
  __syncthreads();  // the block is there
  const int part = thread / tile::kMaskWordsOfTile;
  const int lane = thread % 32;
  const int row = thread % tile::kMaskWordsOfTile / 32 * 16 + lane / 4;
  std::uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const tile::Slot slot = tile::slot_of_key_row(row + 8 * i);
    const std::uint8_t* own = &block[2 * (lane % 4)][params.key_map.key(part, slot.group, slot.element)];
#pragma unroll
    for (int j = 0; j < tile::kMaskTileQueries / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (own[(8 * j + half) * kRowBytes] != 0) bits |= 1u << tile::mask_bit(2 * j + i, half);
      }
    }
  }
  params.to[static_cast<std::int64_t>(number) * kPackThreads + thread] = bits;
}

}  // namespace

void launch_pack_mask(const MaskWordsParams& params, cudaStream_t stream) {
  static_assert(kPackThreads == tile::kMaskTilesOfBlock * tile::kMaskWordsOfTile);
  launch("pack_mask", &pack_mask, {.ctas = grid_of(params.blocks), .threads = kPackThreads}, stream, params);
}

}  // namespace dspattn::cuda::sm90::backward
