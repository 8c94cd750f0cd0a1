// Sums of V that the caller keeps, as kernels see them (value_sums.h, value_means.h): no word of CUDA's own.
#pragma once

#include <cstdint>

#include "cuda/blocks/pages.h"
#include "cuda/blocks/views.h"
#include "cuda/tile/divisor.h"
#include "cuda/tile/lengths.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::blocks {

// V, in one piece or in pages.
struct ValuesView {
  RowsView rows;
  Pages pages;
  DType type = DType::bf16;
  int columns = 0;  // d_v
};

// [sequences, key heads, 2 * blocks, columns + 1] fp32: a row's last number is the count of its keys.
struct SumsView {
  float* data = nullptr;  // null: there are none
  std::int64_t batch_stride = 0, head_stride = 0, row_stride = 0;

  DSPATTN_HOST_DEVICE constexpr std::int64_t offset(int batch, int head, std::int64_t row) const {
    return batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// Of an update.
struct ValueSumsParams {
  ValuesView values;
  SumsView sums;
  tile::LengthsView key_lengths;
  int n_k = 0, new_keys = 0;
  int vector = 0;        // 1: rows are of 16-bit numbers and 16-byte aligned
  tile::Divisor heads;   // key heads
  tile::Divisor chunks;  // CTAs that share a key head's blocks; one: it adds up blocks too
};

}  // namespace dspattn::cuda::blocks
