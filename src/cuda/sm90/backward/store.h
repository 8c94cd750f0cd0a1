// How a key tile's gradients leave: from registers, rounded to 16 bits, to the rows of their keys.
#pragma once

#include <cstdint>

#include "cuda/blocks/sink.h"
#include "cuda/sm90/backward/shared.h"
#include "cuda/tile/key_rows.h"

namespace dspattn::cuda::sm90::backward {

// The two keys whose gradients a thread holds: rows g and g + 8 of its warp's 16.
template <typename C>
struct KeyRows {
  int batch, kv_head;
  int row[2];  // of the tensors; negative: no such key

  __device__ __forceinline__ KeyRows(const BackwardParams& params, const Item& item, int part, int thread)
      : batch(item.batch), kv_head(item.kv_head) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const tile::Slot slot = tile::slot_of_key_row((thread >> 5) * 16 + ((thread & 31) >> 2) + 8 * i);
      const int key =
          item.block * tile::kBlockKeys + params.keys.key(item.part * C::kParts + part, slot.group, slot.element);
      row[i] = key < item.keys ? item.k_row + key : -1;
    }
  }
};

// `vector`: rows are 16-byte aligned and their length is a multiple of 8.
template <typename C>
__device__ __forceinline__ void store_key_rows(const OutView& view, int vector, const KeyRows<C>& rows,
                                               const float (&values)[C::kHeadDim / 2], float scale, int t) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    auto* to = static_cast<std::uint16_t*>(view.data) +
               view.offset(rows.batch, rows.kv_head, rows.row[i] >= 0 ? rows.row[i] : 0);
#pragma unroll
    for (int first = 0; first < C::kHeadDim; first += 32) {
      std::uint32_t x[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float* from = values + first / 2 + 4 * b + 2 * i;
        x[b] = C::kType == DType::bf16 ? ptx::pack_bf16x2(from[0] * scale, from[1] * scale)
                                       : ptx::pack_f16x2(from[0] * scale, from[1] * scale);
      }
      if (vector != 0) {  // lane t takes columns 8t..8t+7 of these 32
        transpose_quad(x, t);
        const int column = first + 8 * t;
        if (rows.row[i] >= 0 && column < view.columns) ptx::store_global_16(to + column, x[0], x[1], x[2], x[3]);
      } else {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const int column = first + 8 * b + 2 * t;
          if (rows.row[i] >= 0 && column < view.columns) to[column] = static_cast<std::uint16_t>(x[b]);
          if (rows.row[i] >= 0 && column + 1 < view.columns) to[column + 1] = static_cast<std::uint16_t>(x[b] >> 16);
        }
      }
    }
  }
}

}  // namespace dspattn::cuda::sm90::backward
