// Masks and biases of a score tile, for the tiles that need them: one lane's places of two rows.
#pragma once

#include <cstdint>

#include "cuda/pipeline/common/params.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::pipeline {

// The part of a warp's tile that one lane holds: rows row0 and row0 + 8, and `count` places from `place` of the key
// block that starts at key `block_key`.
struct LaneTile {
  int batch;
  int head;
  int row0;
  int block_key;
  int place;

  __device__ __forceinline__ int row(int i) const { return row0 + 8 * i; }
  __device__ __forceinline__ int key(const QkPruneParams& p, int offset) const {
    return block_key + key_in_block(place + offset, p.group_log2, p.interleaved);
  }
};

__device__ __forceinline__ std::int64_t mask_offset(const std::int64_t (&stride)[4], const LaneTile& tile, int row,
                                                    int key) {
  return tile.batch * stride[0] + tile.head * stride[1] + row * stride[2] + key * stride[3];
}

__device__ __forceinline__ float bias_at(const ElementMask& mask, const LaneTile& tile, int row, int key) {
  const std::int64_t offset = mask_offset(mask.bias_stride, tile, row, key);
  switch (mask.bias_type) {
    case DType::f16:
      return __half2float(static_cast<const __half*>(mask.bias)[offset]);
    case DType::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(mask.bias)[offset]);
    default:
      return static_cast<const float*>(mask.bias)[offset];
  }
}

// The keys that all of a warp's 32 rows see: a tile within them needs no mask. Empty where single elements decide, or
// where rows are padding. Uniform over the warp.
struct CommonKeys {
  int begin = 0;
  int end = 0;
};

__device__ __forceinline__ CommonKeys common_keys(const QkPruneParams& p, int row32, int key_length) {
  if (p.mask.allowed != nullptr || p.mask.bias != nullptr || row32 + kRowUnit > p.walk.n_q) return {};
  // Begin and end of the visible range grow with the row.
  const core::KeyRange first = p.walk.band.row(row32, p.walk.n_q, p.walk.n_k, key_length);
  const core::KeyRange last = p.walk.band.row(row32 + kRowUnit - 1, p.walk.n_q, p.walk.n_k, key_length);
  return {static_cast<int>(min(last.begin, p.walk.n_k)), static_cast<int>(min(first.end, p.walk.n_k))};
}

// Bit kPlaces * i + o: place `tile.place + o` of row i of the two is visible. Rows past n_q see nothing. Rolled loops:
// few tiles need this, and the registers are taken by the scores.
template <int kPlaces>
__device__ __forceinline__ std::uint32_t visible_places(const QkPruneParams& p, const LaneTile& tile, int key_length) {
  std::uint32_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int row = tile.row(i);
    if (row >= p.walk.n_q) break;
    const core::KeyRange range = p.walk.band.row(row, p.walk.n_q, p.walk.n_k, key_length);
#pragma unroll 1
    for (int o = 0; o < kPlaces; ++o) {
      const int key = tile.key(p, o);
      bool visible = key >= range.begin && key < range.end;
      if (visible && p.mask.allowed != nullptr) {
        visible = p.mask.allowed[mask_offset(p.mask.allowed_stride, tile, row, key)] != 0;
      }
      if (visible && p.mask.bias != nullptr) visible = bias_at(p.mask, tile, row, key) != -INFINITY;
      bits |= static_cast<std::uint32_t>(visible) << (kPlaces * i + o);
    }
  }
  return bits;
}

// The same where nothing but the ends of the matrix hides anything.
template <int kPlaces>
__device__ __forceinline__ std::uint32_t existing_places(const QkPruneParams& p, const LaneTile& tile) {
  std::uint32_t bits = 0;
#pragma unroll 1
  for (int o = 0; o < kPlaces; ++o) {
    if (tile.key(p, o) < static_cast<int>(p.walk.n_k)) bits |= (1u | 1u << kPlaces) << o;
  }
  constexpr std::uint32_t kRow = (1u << kPlaces) - 1;
  const int n_q = static_cast<int>(p.walk.n_q);
  return bits & ((tile.row(0) < n_q ? kRow : 0u) | (tile.row(1) < n_q ? kRow << kPlaces : 0u));
}

// bias * factor; a finite bias stays finite, so that the lowest number, as models write masks, does not become -inf.
__device__ __forceinline__ float scaled_bias(float bias, float factor) {
  constexpr float kLargest = 3.40282347e38f;
  const float scaled = bias * factor;
  return isinf(scaled) && !isinf(bias) ? copysignf(kLargest, scaled) : scaled;
}

// Adds bias * factor to the scores. scores[b][2r + i] is row r of the two, place offset 2b + i.
template <int kBlocks>
__device__ __forceinline__ void add_bias(const QkPruneParams& p, const LaneTile& tile, float factor,
                                         float (&scores)[kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < kBlocks * 4; ++i) {
    const int offset = i / 2, r = i % 2;
    // One load at a time, and nothing kept from one to the next: this path has no registers to spare.
    const int row = ptx::forget(tile.row0) + 8 * r;
    const int key = tile.block_key + key_in_block(ptx::forget(tile.place) + offset, p.group_log2, p.interleaved);
    if (row < p.walk.n_q && key < p.walk.n_k) {
      scores[offset / 2][2 * r + offset % 2] += scaled_bias(bias_at(p.mask, tile, row, key), factor);
    }
  }
}

}  // namespace dspattn::cuda::pipeline
