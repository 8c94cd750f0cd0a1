// What the host tells the kernels of the general backward: one struct, passed by value.
#pragma once

#include <cstdint>

#include "cuda/blocks/random_state.h"
#include "cuda/blocks/scales.h"
#include "cuda/blocks/views.h"
#include "cuda/blocks/work_params.h"
#include "cuda/general/params.h"
#include "cuda/tile/gradient_walk.h"
#include "cuda/tile/key_tiles.h"

namespace dspattn::cuda::general::backward {

using namespace blocks;

// Of a query row. Its weights are 2^((score - reference) * exp2_scale - lse).
struct alignas(16) RowNumbers {
  float lse;        // base 2; +inf where the row sees no key, NaN where the row is undefined
  float d;          // dO.O - dLSE
  float reference;  // a score; not 0 only where the LSE's rounding would hide the weights (references.h)
  std::uint32_t dropout;
};

// What the query-stationary kernel makes.
enum class Target : std::int32_t {
  references,  // RowNumbers of rows whose LSE is too large to tell anything
  queries,     // dQ
  bias,        // the gradient of the bias, or a part of it
};

// Copies of the inputs in the workspace as shared memory will have them (config.h), by head; what does not exist is
// zeros, and so are NaN of K, what is not finite in V, and rows that are undefined: in products they would meet weights
// of 0. Infinities of K are the largest number.
struct Prepared {
  std::uint8_t* q = nullptr;       // [heads][rows][stride], times 2^-e (16-bit) or rounded to tf32
  std::uint8_t* d_out = nullptr;   // the same of dO
  RowNumbers* numbers = nullptr;   // [heads][rows]
  std::uint8_t* keys = nullptr;    // [kv_heads][tiles]: 32 rows of K, 32 rows of V, in the order of the scores' columns
  float* bias_parts = nullptr;     // [batch][heads][n_q|1][n_k|1], where rows or keys are summed
  float* sums = nullptr;           // [sum][query tile]: dQ / scale, where CTAs of the key-stationary kernel add to it
  std::int32_t* counts = nullptr;  // [sum][query tile]: shares that are in
  std::int32_t* taken = nullptr;   // items that CTAs have taken
  std::int64_t head_rows = 0;      // of a head, of all sequences
  std::int64_t head_tiles = 0;
};

struct Dropping {
  std::uint32_t threshold = 0;  // 0: nothing is dropped
  float factor = 1;             // of the weights that stay
  RandomState random;
};

// The gradient of the bias, [batch|1, heads|1, n_q|1, n_k|1].
struct BiasGradient {
  void* data = nullptr;
  std::int64_t stride[4] = {};
  int extent[4] = {};
  int is_fp32 = 1;
  int sums_rows = 0, sums_keys = 0;  // the dimension has an extent of 1 and is longer in the problem
};

struct BackwardParams {
  RowsView q, k, v;     // [batch, heads | kv_heads, rows, d | d_v]
  RowsView out, d_out;  // [batch, heads, rows, d_v]
  LseView lse, d_lse;   // read only; d_lse null: there is none
  OutView d_q, d_k, d_v;
  MaskTensor allowed;  // bytes, zero = masked
  MaskTensor bias;
  BiasType bias_type = BiasType::f32;
  WorkParams work;
  tile::KeyTiles tiles;
  ScoreScales scales;
  Prepared prepared;
  Dropping dropping;
  BiasGradient bias_gradient;
  const float* sinks = nullptr;
  std::int64_t sink_stride = 0;
  float* d_sinks = nullptr;
  std::int64_t d_sink_stride = 0;

  Target target = Target::queries;
  float score_scale = 1;  // as in the forward
  float cap = 0;          // of compared scores before a bias is added; 0: none
  float d_q_scale = 1;    // from accumulators to dQ
  float d_k_scale = 1;    // from accumulators, whose Q may be scaled, to dK
  int keep = 0;           // of a group; 0: all
  int sequences = 0, kv_heads = 0;
  int d = 0, value_d = 0;
  int stride = 0;                  // bytes of a prepared row
  int tf32 = 0;                    // prepared rows are rounded
  int row_units = 0;               // of kRowUnit rows, of a sequence
  int tile_units = 0;              // of kTileUnit key tiles, of a sequence
  int row_tiles = 0;               // of the query-stationary kernel, of a sequence
  int key_rows = 0;                // key tiles are in the order of tile::column_of_key_row
  int key_tiles = 0;               // of a CTA of the key-stationary kernel
  tile::GradientItems items = {};  // of the key-stationary kernel: a CTA's tiles of a (sequence, key head)
  int loads_keys = 0;              // the key-stationary kernel takes K and V from the inputs: they are not prepared
  int adds_queries = 0;            // the key-stationary kernel makes dQ, too
  int wraps = 0;                   // see tile/gradient_walk.h; then there are two sums
  int key_tile_q = 0;              // rows of its query tiles
  int query_stages = 1, key_stages = 1;
  int vector_q = 0, vector_k = 0, vector_v = 0, vector_out = 0, vector_d_out = 0;  // rows are 16-byte aligned
  int fp32_out = 0, fp32_d_out = 0, fp32_d_q = 0, fp32_d_k = 0, fp32_d_v = 0;      // tensors in fp32
};

}  // namespace dspattn::cuda::general::backward
