// Where a sequence's rows and key tiles lie, as all kernels of the general backward see it.
#pragma once

#include "cuda/blocks/work.h"
#include "cuda/general/backward/config.h"
#include "cuda/general/backward/params.h"
#include "cuda/general/backward/scores.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::general::backward {

struct SequenceRows {
  int batch;                   // of the tensors
  int q_row, rows;             // first query row in the tensors, and how many
  int k_row, keys;             // the same of keys
  std::int64_t prepared_row;   // of a head's prepared rows, the sequence's first
  std::int64_t prepared_tile;  // of a key head's prepared tiles
  tile::RowBand band;
};

// Sequences of a packed batch lie one behind the other, each from a multiple of the unit on: those of one that begins
// at row `begin` start with unit begin / unit + sequence, which leaves room for all before (tile/gradient_walk.h).
__device__ __forceinline__ SequenceRows sequence_rows(const BackwardParams& params, int sequence) {
  Work work;
  const int keys = describe_sequence(params.work, sequence, work);
  const bool packed = params.work.cumulative_q.present();
  const int unit_keys = kTileUnit * params.tiles.span >> params.tiles.parts_log2;
  const int row_unit = packed ? work.q_row / kRowUnit + sequence : sequence * params.row_units;
  const int tile_unit = packed ? work.k_row / unit_keys + sequence : sequence * params.tile_units;
  const WorkParams& w = params.work;
  return {work.batch,
          work.q_row,
          work.rows,
          work.k_row,
          keys,
          static_cast<std::int64_t>(row_unit) * kRowUnit,
          static_cast<std::int64_t>(tile_unit) * kTileUnit,
          {w.left, w.right, w.offset + (w.bottom_right != 0 ? keys - work.rows : 0),
           tile::visible_keys(w.key_lengths, sequence, keys)}};
}

// The key, of the sequence, at a column of the scores of a key tile; negative: there is none.
__device__ __forceinline__ int key_of_tile_column(const tile::KeyTiles& tiles, const tile::RowBand& band, int tile,
                                                  int column) {
  const int in_span = tile::key_of_column<tile::TileLayout::places, 32>(tiles, tiles.part(tile), column);
  const int key = tiles.first_key(tile) + in_span;
  return in_span >= 0 && key < band.key_length ? key : -1;
}

// Bytes that follow each other, by kThreads threads of which this is number `thread`, 16 a turn.
template <int kThreads, int kBytes>
__device__ __forceinline__ void copy_bytes(std::uint32_t to, const void* from, int thread) {
  static_assert(kBytes % 16 == 0);
  constexpr int kTurns = (kBytes / 16 + kThreads - 1) / kThreads;
  [[maybe_unused]] constexpr int kAtOnce = kTurns <= 20 ? kTurns : 4;
  const auto* source = static_cast<const std::uint8_t*>(from) + 16 * thread;
  const std::uint32_t target = to + static_cast<std::uint32_t>(16 * thread);
#pragma unroll kAtOnce
  for (int at = 0; at < kBytes / 16; at += kThreads) {
    if (at + kThreads <= kBytes / 16 || at + thread < kBytes / 16) {
      ptx::cp_async_16(target + 16 * at, source + 16 * at);
    }
  }
}
template <int kThreads, int kBytes>
__device__ __forceinline__ void copy_bytes(std::uint32_t to, const void* from) {
  copy_bytes<kThreads, kBytes>(to, from, own_thread());
}

// Whether all columns before `end` of a row of a gradient can be stored two by two, in the inputs' type.
template <DType kType>
__device__ __forceinline__ bool takes_pairs(const OutView& view, bool fp32, std::int64_t row, int end) {
  constexpr int kBytes = kType == DType::f32 ? 4 : 2;
  return fp32 == (kType == DType::f32) && end <= view.columns &&
         (reinterpret_cast<std::uintptr_t>(view.data) + row * kBytes) % (2 * kBytes) == 0;
}
template <DType kType>
__device__ __forceinline__ void store_whole_pair(const OutView& view, std::int64_t at, float a, float b) {
  if constexpr (kType == DType::f32) {
    ptx::store_global_8(static_cast<float*>(view.data) + at, a, b);
  } else {
    *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(view.data) + at) =
        kType == DType::bf16 ? ptx::pack_bf16x2(a, b) : ptx::pack_f16x2(a, b);
  }
}
// Two neighbouring columns of a row of a gradient, of which the second may not be there.
template <DType kType>
__device__ __forceinline__ void store_pair(const OutView& view, bool fp32, std::int64_t row, int column, float a,
                                           float b) {
  if (column >= view.columns) return;
  const bool both = column + 1 < view.columns;
  if (fp32) {
    float* to = static_cast<float*>(view.data) + row + column;
    if (both && reinterpret_cast<std::uintptr_t>(to) % 8 == 0) return ptx::store_global_8(to, a, b);
    to[0] = a;
    if (both) to[1] = b;
    return;
  }
  auto* to = static_cast<std::uint16_t*>(view.data) + row + column;
  const std::uint32_t pair = kType == DType::bf16 ? ptx::pack_bf16x2(a, b) : ptx::pack_f16x2(a, b);
  if (both && reinterpret_cast<std::uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<std::uint32_t*>(to) = pair;
    return;
  }
  to[0] = static_cast<std::uint16_t>(pair);
  if (both) to[1] = static_cast<std::uint16_t>(pair >> 16);
}

}  // namespace dspattn::cuda::general::backward
