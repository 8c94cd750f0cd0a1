// What the host tells the split-key kernels: one struct, passed by value.
#pragma once

#include <cstdint>

#include "cuda/blocks/pages.h"
#include "cuda/blocks/value_sums_params.h"
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
// no key was seen. With rest = mean all visible keys' weights, and besides the pruned ones' alone.
struct alignas(kStatsBytes) RowStats {
  float reference;
  float sum;
  float rest = 0;
};
static_assert(sizeof(RowStats) == kStatsBytes);

// The same of all visible keys, before any is chosen.
struct alignas(kToldBytes) ToldStats {
  float reference;
  float sum;
};
static_assert(sizeof(ToldStats) == kToldBytes);

// Results of parts of the keys, in the caller's workspace: of a unit's clusters.
struct Partials {
  float* out = nullptr;       // [units, clusters, rows, stride], relative to the references; null: results are final
  RowStats* stats = nullptr;  // [units, clusters, rows]
  int stride = 0;             // d_v, rounded up to four
};

// CTAs of a unit count themselves when their parts are there: the last one joins these.
struct Arrivals {
  std::uint64_t* counters = nullptr;  // [units], of 48 bits of a tag and a count (ptx/tagged.h); null: nobody counts
  std::uint64_t tag = 0;              // of this launch
};

// Where final results go.
struct Results {
  blocks::OutView out;
  blocks::LseView lse;
  int fp32 = 0;  // out's type, if not the inputs'
};

// Heads that share keys and choose together, where their scores do not stay in shared memory: every key's are written
// before any is chosen.
struct Together {
  std::uint16_t* scores = nullptr;  // [units, tiles, rows, tile keys] fp16: compared scores, -inf where hidden
  // Of all visible keys: [units, splits, rows], or where lanes choose ToldStats [units, splits, teams, rows of lanes].
  RowStats* stats = nullptr;
  int tiles = 0;  // of a unit
  // Where CTAs that are no cluster keep scores: ToldStats with a tag, [units, splits, rows of lanes]; else null.
  std::uint8_t* told = nullptr;
};

struct Params {
  blocks::RowsView q, k, v;  // k and v of pages: a batch is a page
  Pages pages;
  Together together;
  Results results;
  Partials partials;
  Arrivals arrivals;
  blocks::SumsView value_sums;  // rest = mean: of V, by the caller; null: rest = drop
  blocks::ValuesView values;    // and V, once more
  blocks::MaskTensor allowed, bias;
  int bias_bytes = 0;
  tile::LengthsView key_lengths;
  int left = 0, right = 0, diagonal = 0;  // tile::RowBand
  int n_q = 0, n_k = 0, d = 0;
  int all_rows = 0;         // of a key head: n_q * heads_per_kv_head
  int rows = 0;             // of those, of a unit at most
  tile::Divisor row_tiles;  // units of a key head
  tile::Divisor queries;    // n_q
  int heads_per_kv_head = 1;
  tile::Divisor kv_heads;
  tile::Divisor splits;
  tile::Divisor cluster;  // CTAs that join their results in shared memory; splits is a multiple of it
  tile::KeyMap keys;
  int pairs = 0;  // 1: one of each two keys, else two of four
  Scales scales;
  Teams teams;
  SharedLayout layout;                           // of these, and more that a kernel need not compute:
  tile::Divisor chunks;                          // layout.chunks
  int team_shift = 0;                            // log2 of a team's warps
  int lane_shift = 0;                            // log2 of a row's lanes, of which there are 32 / teams.rows
  int vector_q = 0, vector_k = 0, vector_v = 0;  // rows are 16-byte aligned
  // Bytes from one row to the next (of a page), where rows are aligned and not too far apart; else 0.
  std::uint32_t k_row_bytes = 0, v_row_bytes = 0;
  // 1: keys of a tile that are the same element of their groups lie evenly spaced: in one page, or there are none.
  int runs = 1;

  // rest = mean: the weight of pruned keys counts.
  DSPATTN_HOST_DEVICE bool keeps_rest() const { return value_sums.data != nullptr; }

  DSPATTN_HOST_DEVICE tile::PackedRow packed_row(int row) const {
    return {queries.quotient(row), queries.remainder(row)};
  }
};

}  // namespace dspattn::cuda::decode
