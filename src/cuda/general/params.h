// What the host tells the general forward kernel: one struct, passed by value, made of the building blocks' parts.
#pragma once

#include <cstdint>

#include "cuda/blocks/scales.h"
#include "cuda/blocks/views.h"
#include "cuda/blocks/work_params.h"
#include "cuda/tile/key_tiles.h"

namespace dspattn::cuda::general {

using namespace blocks;

// A mask tensor's element.
enum class BiasType : std::int32_t { f32, as_inputs };

struct ForwardParams {
  RowsView q, k, v;    // [batch, heads | kv_heads, rows, d | d_v]
  OutView out;         // [batch, heads, rows, d_v]
  LseView lse;         // [batch, heads, rows]
  MaskTensor allowed;  // bytes, zero = masked
  MaskTensor bias;
  const float* sinks = nullptr;  // [heads], a logit of every row of a head; null: none
  std::int64_t sink_stride = 0;
  BiasType bias_type = BiasType::f32;
  WorkParams work;
  tile::KeyTiles tiles;
  ScoreScales scales;
  float score_scale = 1;  // 2^-e where Q is not multiplied by it: it may not fit fp16
  int keep = 0;           // of a group; 0: all
  int one_of_two = 0;     // `fours`: the pattern is 1:2
  int d = 0, d_v = 0;
  int row_tiles = 0;                                             // of a head
  int stages = 1;                                                // of K and V
  int vector_q = 0, vector_k = 0, vector_v = 0, vector_out = 0;  // rows are 16-byte aligned: copies of 16 bytes
  int fp32_out = 0;
};

}  // namespace dspattn::cuda::general
