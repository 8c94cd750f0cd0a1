// What the host tells the fused kernel: one struct, passed by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/tile/key_map.h"
#include "cuda/tile/schedule.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::sm90 {

// A [batch, heads, rows, columns] tensor with contiguous columns; strides in elements.
struct Rows {
  const void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
};

// A mask tensor [batch|1, heads|1, n_q|1, n_k|1]; the stride of a broadcast dimension is 0.
struct MaskTensor {
  const void* data = nullptr;  // null: absent
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t key_stride = 0;  // times 128 within 32 bits
};

// Rows of the output that a warp stores at once, and the full variant's sender.
inline constexpr int kStoredRows = 16;
inline constexpr int kSentRows = 64;

struct FusedParams {
  CUtensorMap q_map;  // (column, row, head, batch)
  CUtensorMap k_map;  // (column, element, row, head, batch): see tensor_maps.cpp
  CUtensorMap v_map;
  CUtensorMap out_map;                // (column, row, head, batch)
  CUtensorMap allowed_map, bias_map;  // (key, row, head, batch)

  Rows q, k, v;
  void* out = nullptr;  // [batch, heads, rows, d_v]
  std::int64_t out_batch_stride = 0, out_head_stride = 0, out_row_stride = 0;
  float* lse = nullptr;  // [batch, heads, rows]; may be null
  std::int64_t lse_batch_stride = 0, lse_head_stride = 0, lse_row_stride = 0;

  MaskTensor allowed;  // bytes, zero = masked
  MaskTensor bias;
  int bias_is_f32 = 0;  // else the inputs' type

  // The 16-bit kernel's general variant only.
  int bias_bytes = 0;   // of an element
  int mask_bytes = 0;   // of an element of the larger mask tensor; 0: there is none
  int mask_engine = 0;  // the copy engine can read all there are

  const std::int32_t* cumulative_q = nullptr;  // packed batches only
  const std::int32_t* cumulative_k = nullptr;
  const std::int32_t* key_lengths = nullptr;

  tile::ItemOrder order;                     // where there is no schedule
  tile::ScheduleHeader* schedule = nullptr;  // its entries lie behind it
  int pairs = 0;                             // 1: thread blocks work in pairs, see Config::kPairs
  int alike = 0;                             // 1: pairs, and their items all cost the same
  int short_items = 0;                       // every item has one block of keys, or two
  int descending = 0;                        // 1: an item's blocks of keys come from its last down to its first
  int partial_blocks = 1;                    // 0: no sequence has a last block of fewer than 128 keys
  // The copy engine may read past a sequence's end, up to these elements of K and V: the first of the last row.
  std::int64_t last_k = 0, last_v = 0;
  tile::KeyMap keys;
  tile::Divisor heads;
  tile::Divisor heads_per_kv_head;
  int n_q = 0;
  int n_k = 0;
  int d = 0;
  int d_v = 0;
  int left = 0, right = 0, bottom_right = 1;

  std::uint32_t q_scale = 0;          // 2^-e in the inputs' type, twice: scores times this are compared, in fp16
  float exp2_scale = 1;               // from those to base-2 logarithms of weights: scale * 2^e * log2(e)
  std::uint32_t exp2_scale_half = 0;  // the same in fp16, twice: where exponentials are taken in fp16
  float exp2_scale_ratio = 1;         // of the two
  float bias_scale = 1;               // from a bias to the compared scores: 2^-e / scale

  float one = 1;           // a factor the compiler does not know
  std::uint32_t zero = 0;  // nor this

  // The copy engine cannot read a tensor whose base or strides are no multiple of 16 bytes: then threads copy.
  int copy_engine_q = 0, copy_engine_k = 0, copy_engine_v = 0, copy_engine_out = 0;
  int vector_q = 0, vector_k = 0, vector_v = 0, vector_out = 0;  // rows are 16-byte aligned: copies of 16 bytes
};

}  // namespace dspattn::cuda::sm90
