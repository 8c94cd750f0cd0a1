// What runs before a kernel with rest = mean: the means of V that tile/means.h speaks of, in a table.
//
// One kernel adds up V over every whole block of 128 keys, and over the first keys of sequences; a second one adds up
// blocks, and where windows are narrow single keys. Everything is added in a fixed order, in fp32, and nothing is ever
// subtracted: what a row does not see, be it NaN, reaches none of its numbers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/blocks/pages.h"
#include "cuda/blocks/views.h"
#include "cuda/blocks/work_params.h"
#include "cuda/tile/means.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::blocks {

// The table as a kernel reads it: [heads][entries][columns] fp32, of the key heads, or of all heads where masks differ
// from head to head.
struct MeansView {
  const float* data = nullptr;  // null: rest = drop
  tile::MeanTable table;
  tile::Divisor heads_per_mean{};  // query heads that share an entry
};

struct MeansParams {
  RowsView v;
  Pages pages;
  DType type = DType::bf16;
  int columns = 0;                     // d_v
  int vector = 0;                      // 1: rows of V are 16-byte aligned
  int heads = 0;                       // that have means of their own
  tile::Divisor heads_per_key_head{};  // of these
  MaskTensor allowed, bias;            // with one query row
  int bias_bytes = 0;
  WorkParams work;  // lengths and band
  int sequences = 0;
  tile::MeanTable table;
  int stride = 0;          // floats of an entry: the columns, filled up with zeros
  float* means = nullptr;  // [heads][table.entries][stride]
  float* sums = nullptr;   // [heads][table.all_blocks][stride]: of every whole block,
  int* counts = nullptr;   // [heads][table.all_blocks]: and of how many keys
};

// Rows of V that prefix_means.cu reads: of 16-bit elements, 16-byte aligned, in one piece.
bool has_plain_rows(const MeansParams& params);
// Of such rows, where query rows see all keys before their last and no mask tensor hides any: one kernel.
void launch_plain_prefix_means(const MeansParams& params, cudaStream_t stream);

// The kernel that follows may start before these have ended: it must wait for them before it reads the table.
void launch_means(const MeansParams& params, cudaStream_t stream);

}  // namespace dspattn::cuda::blocks
