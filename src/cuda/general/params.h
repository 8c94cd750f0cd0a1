// What the host tells the general forward kernel: one struct, passed by value, made of the building blocks' parts.
#pragma once

#include <cstdint>

#include "cuda/blocks/means_params.h"
#include "cuda/blocks/pages.h"
#include "cuda/blocks/random_state.h"
#include "cuda/blocks/scales.h"
#include "cuda/blocks/views.h"
#include "cuda/blocks/work_params.h"
#include "cuda/tile/copy_steps.h"
#include "cuda/tile/divisor.h"
#include "cuda/tile/group_rows.h"
#include "cuda/tile/key_tiles.h"

namespace dspattn::cuda::general {

using namespace blocks;

// A mask tensor's element.
enum class BiasType : std::int32_t { f32, as_inputs };

// What few problems ask for. Tiles are then weighed in more steps: selected, capped, dropped.
struct Extras {
  int present = 0;  // 1: any of these
  float cap = 0;    // of compared scores; 0: none
  // Passes over a tile's scores in which keys are chosen, before the one in which they are weighed; 0: that one. One
  // where a bias comes after a cap, without which scores are compared; else one for each part of heads that choose
  // together.
  int choosing_passes = 0;
  int cap_before_bias = 0;
  int counts_apart = 0;  // 1: some weights count that do not meet V
  MeansView means;       // rest = mean

  std::uint32_t drop_below = 0;  // random bits below this drop a weight; 0: no dropout
  float keep_probability = 1;
  RandomState random;

  // Heads that choose their keys together: totals of all visible scores (shared_choice.h), two numbers each,
  // [sequences or 1, heads, rows].
  LseView shared_totals;
};

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
  Pages pages;            // k and v of pages: a batch is a page
  tile::GroupRows group;  // heads in a tile's rows
  Extras extras;
  tile::KeyTiles tiles;
  ScoreScales scales;
  float score_scale = 1;  // 2^-e where Q is not multiplied by it: it may not fit fp16
  int keep = 0;           // of a group; 0: all
  int one_of_two = 0;     // `fours`: the pattern is 1:2
  int d = 0, d_v = 0;
  int column_parts = 1;                                          // CTAs that share a row tile's columns of the output
  int stages = 1;                                                // of K and V; 0: both in one place
  int vector_q = 0, vector_k = 0, vector_v = 0, vector_out = 0;  // rows are 16-byte aligned: copies of 16 bytes
  int bare_scores = 0;   // 1: scores are compared as the product leaves them, but for the band
  int cheap_copies = 0;  // 1: tiles of K and V are copied by these steps (copy.h, NextTile)
  tile::CopySteps k_steps, v_steps;
};

}  // namespace dspattn::cuda::general
