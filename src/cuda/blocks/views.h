// Tensors in global memory as kernels see them: plain structs, parts of a kernel's parameters. Strides in elements.
#pragma once

#include <cstdint>

#include "dspattn/pattern.h"

namespace dspattn::cuda::blocks {

// A [batch, heads, rows, columns] tensor with contiguous columns.
struct RowsView {
  const void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;

  DSPATTN_HOST_DEVICE constexpr std::int64_t offset(int batch, int head, std::int64_t row) const {
    return batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// The output, [batch, heads, rows, d_v].
struct OutView {
  void* data = nullptr;
  std::int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
  int columns = 0;  // d_v
  int fp32 = 0;     // 1: in fp32, whatever the type of the inputs

  DSPATTN_HOST_DEVICE constexpr std::int64_t offset(int batch, int head, std::int64_t row) const {
    return batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// Rows of the output that a warp sends at once, where results leave by way of shared memory.
inline constexpr int kStoredRows = 16;

// Log-sum-exps, [batch, heads, rows].
struct LseView {
  float* data = nullptr;  // null: nobody asked for them
  std::int64_t batch_stride = 0, head_stride = 0, row_stride = 0;

  DSPATTN_HOST_DEVICE constexpr std::int64_t offset(int batch, int head, std::int64_t row) const {
    return batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// A mask tensor [batch|1, heads|1, n_q|1, n_k|1]; the stride of a broadcast dimension is 0.
struct MaskTensor {
  const void* data = nullptr;  // null: absent
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t key_stride = 0;  // times 128 within 32 bits
};

}  // namespace dspattn::cuda::blocks
