// What the host tells the split-key kernels: one struct, passed by value.
#pragma once

#include <cstdint>

#include "cuda/blocks/pages.h"
#include "cuda/blocks/views.h"
#include "cuda/decode/config.h"
#include "cuda/tile/divisor.h"
#include "cuda/tile/few_rows.h"
#include "cuda/tile/lengths.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::decode {

using blocks::Pages;

// From products to compared scores, and on to logarithms of weights in base 2 (docs/notation.md). Unlike the fused
// kernels' the inputs are left as they are.
struct Scales {
  float unit = 1;      // 16 bits: 2^-e; fp32: 1, or with a bias a power of two that keeps sums finite
  float bias = 1;      // from a bias to the compared scores
  float exponent = 1;  // from those to base-2 logarithms
  int rounds = 0;      // 1: scores are compared as fp16 numbers
};

// Of one row over a part of the keys: what its weights are relative to, in compared scores, and their sum. A sum of 0:
// no key was seen.
struct alignas(8) RowStats {
  float reference;
  float sum;
};

// Results of parts of the keys, in the caller's workspace.
struct Partials {
  float* out = nullptr;       // [units, splits, rows, d_v], relative to the references; null: the results are final
  RowStats* stats = nullptr;  // [units, splits, rows]
};

// Where final results go.
struct Results {
  blocks::OutView out;
  blocks::LseView lse;
  int fp32 = 0;  // out's type, if not the inputs'
};

// Heads that share keys and choose together: every key's scores are written before any is chosen.
struct Together {
  float* scores = nullptr;    // [units, tiles, rows, tile keys]: compared scores, -inf where hidden
  RowStats* stats = nullptr;  // [units, splits, rows]: of all visible keys
  int tiles = 0;              // of a unit
  int batch = 1;              // tiles whose V a team asks for at once
};

struct Params {
  blocks::RowsView q, k, v;  // k and v of pages: a batch is a page
  Pages pages;
  Together together;
  Results results;
  Partials partials;
  blocks::MaskTensor allowed, bias;
  int bias_bytes = 0;
  tile::LengthsView key_lengths;
  int left = 0, right = 0, diagonal = 0;  // tile::RowBand
  int n_q = 0, n_k = 0, d = 0;
  int rows = 0;  // of a key head: n_q * heads_per_kv_head
  int heads_per_kv_head = 1;
  tile::Divisor kv_heads;
  tile::Divisor splits;
  tile::KeyMap keys;
  int pairs = 0;  // 1: one of each two keys, else two of four
  Scales scales;
  Teams teams;
  int vector_q = 0, vector_k = 0, vector_v = 0;  // rows are 16-byte aligned
  // Bytes from one row to the next, where rows are aligned, in one piece and not too far apart; else 0.
  std::uint32_t k_row_bytes = 0, v_row_bytes = 0;
};

}  // namespace dspattn::cuda::decode
