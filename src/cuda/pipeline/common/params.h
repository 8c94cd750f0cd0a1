// What the pipeline's kernels are told: plain structs, passed by value.
#pragma once

#include <cstdint>

#include "cuda/pipeline/common/walk.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::pipeline {

// Rows of head-dim elements, [batch, heads, n, d]; strides in elements, the last one 1.
struct RowsParams {
  const void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  int extent = 0;        // d: elements per row
  bool aligned = false;  // base and strides are multiples of 16 bytes: cp.async may be used
  int advance = 0;       // see copy_rows; 0: a tile may not be copied that way
};

// The sparse matrices of all (batch, head), one after another.
struct MatrixParams {
  void* nonzeros = nullptr;  // [batch * heads, rows, places / 2]
  std::uint32_t* metadata =
      nullptr;                      // [batch * heads, places / places_per_word_column, rows], encoding of the contract
  std::int64_t rows = 0;            // n_q padded to kRowUnit
  std::int64_t places = 0;          // padded to whole metadata words; width * block with a block mask
  std::int64_t metadata_words = 0;  // per matrix
};

// Masks that need a look at single elements. Strides in elements, 0 where the tensor is broadcast.
struct ElementMask {
  const std::uint8_t* allowed = nullptr;
  std::int64_t allowed_stride[4] = {};
  const void* bias = nullptr;
  DType bias_type = DType::f32;
  std::int64_t bias_stride[4] = {};
};

struct QkPruneParams {
  RowsParams q;
  RowsParams k;
  MatrixParams scores;
  BlockWalk walk;
  ElementMask mask;
  int heads = 0;
  int heads_per_kv = 1;
  int row_tiles = 0;     // CTAs along a matrix's rows
  int rows_per_cta = 0;  // whole block rows
  int key_groups = 1;    // CTAs along a matrix's places
  int group_log2 = 2;    // 2: groups of 4 keep 2; 1: groups of 2 keep 1
  bool interleaved = false;
  bool banded = false;    // a causal mask, a window or key lengths hide something
  float key_scale = 1;    // 2^-e of the contract (1 for fp32): what scores are multiplied by before they are compared
  float value_scale = 1;  // what a compared score is multiplied by to give the stored one
  float bias_scale = 1;   // 1 / scale: what a bias is multiplied by before it is added to q.k
};

struct SoftmaxParams {
  MatrixParams matrix;
  BlockWalk walk;
  float* lse = nullptr;  // [batch * heads, n_q] with the strides below; null: not wanted
  std::int64_t lse_stride[3] = {};
  std::int64_t matrices = 0;
  int heads = 0;
};

struct PvSparseParams {
  MatrixParams weights;
  RowsParams v;
  BlockWalk walk;
  void* out = nullptr;  // [batch, heads, n_q, d_v], strides in elements
  std::int64_t out_stride[3] = {};
  bool out_aligned = false;  // 8-byte stores may be used
  bool out_fp32 = false;     // whatever the type of the weights
  int heads = 0;
  int heads_per_kv = 1;
  int row_tiles = 0;
  int column_tiles = 1;  // CTAs along d_v
  int group_log2 = 2;
  bool interleaved = false;
};

}  // namespace dspattn::cuda::pipeline
