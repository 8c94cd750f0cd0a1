// What the passes of the fast CPU backward share: the rows of a tile, their weights and dS.
#if defined(DSPATTN_CPU_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSPATTN_CPU_BACKWARD_INL_H_
#undef DSPATTN_CPU_BACKWARD_INL_H_
#else
#define DSPATTN_CPU_BACKWARD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "cpu/backward_job.h"
#include "cpu/job.h"
#include "cpu/load-inl.h"
#include "cpu/products-inl.h"
#include "cpu/prune-inl.h"
#include "cpu/select-inl.h"
#include "cpu/softmax-inl.h"
#include "cpu/tile.h"

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {

// Reads what the rows of tile `t` need: q, dO, lse and delta.
inline void load_tile(const BackwardJob& run, const SequenceSpan& sequence, const BackwardScratch& s,
                      std::ptrdiff_t t) {
  const std::ptrdiff_t qk_tile = static_cast<std::ptrdiff_t>(run.qk.padded) * kTileQ;
  const std::ptrdiff_t pv_tile = static_cast<std::ptrdiff_t>(run.pv.padded) * kTileQ;
  const TileRows& tile = s.tiles[t];
  float* lse = s.lse + t * kTileQ;
  float* delta = s.delta + t * kTileQ;
  float* d_out = s.d_out_rows + t * pv_tile;
  s.far[t] = false;
  s.nan[t] = 0;
  widen_tile(run.job.q, sequence, tile, run.qk, s.q_rows + t * qk_tile);
  widen_tile(run.d_out, sequence, tile, run.pv, d_out);
  for (int r = 0; r < kTileQ; ++r) {
    // The weights of a row past the end are exp(-infinity).
    lse[r] = std::numeric_limits<float>::infinity();
    delta[r] = 0.0f;
    if (r >= tile.rows) continue;
    const std::int64_t row = sequence.q_begin + tile.position[r];
    lse[r] = run.lse_at(sequence.batch, tile.head[r], row);
    widen_row(run.out.at(sequence.batch, tile.head[r], row), run.out.dtype, run.pv.columns, s.row);
    VecF sum = hn::Zero(kF32);
    for (int x = 0; x < run.pv.padded; x += kLanes) {
      sum = hn::MulAdd(hn::Load(kF32, s.row + x), hn::Load(kF32, d_out + r * run.pv.padded + x), sum);
    }
    delta[r] = hn::GetLane(hn::SumOfLanes(kF32, sum)) - run.d_lse_at(sequence.batch, tile.head[r], row);
    if (std::isnan(lse[r])) s.nan[t] |= 1u << r;
    s.far[t] = s.far[t] || (std::isfinite(lse[r]) && std::abs(lse[r]) >= kFarLse);
  }
  const float* q_row[kTileQ];
  const float* d_out_row[kTileQ];
  for (int r = 0; r < kTileQ; ++r) {
    q_row[r] = s.q_rows + t * qk_tile + static_cast<std::ptrdiff_t>(r) * run.qk.padded;
    d_out_row[r] = d_out + static_cast<std::ptrdiff_t>(r) * run.pv.padded;
  }
  transpose_tile(q_row, run.qk.columns, s.q_packed + t * qk_tile);
  transpose_tile(d_out_row, run.pv.columns, s.d_out_packed + t * pv_tile);
}

// The maximum and the sum of exponentials of every row of the tiles that are far off, as forward made them.
inline void find_far_sums(const BackwardJob& run, const SequenceSpan& sequence, std::int64_t kv_head,
                          std::ptrdiff_t tiles, std::int64_t first_block, std::int64_t end, const BackwardScratch& s) {
  const Job& job = run.job;
  const std::ptrdiff_t qk_tile = static_cast<std::ptrdiff_t>(run.qk.padded) * kTileQ;
  std::fill_n(s.largest, tiles * kTileQ, -std::numeric_limits<float>::infinity());
  std::fill_n(s.sum, tiles * kTileQ, 0.0f);
  for (std::int64_t block = first_block; block < end; block += job.block_keys) {
    const KeyRows k = keys_of_block(job, sequence, kv_head, block, run.qk, s.row, s.k_panels);
    for (std::ptrdiff_t t = 0; t < tiles; ++t) {
      if (!s.far[t] || !prune_tile(job, sequence, s.tiles[t], s.q_packed + t * qk_tile, k, block, run.qk.width,
                                   *s.prune, s.slots[t])) {
        continue;
      }
      weigh(s.slots[t], job.scale_log2(), {s.largest + t * kTileQ, s.sum + t * kTileQ}, s.rescale + t * kTileQ);
    }
  }
  // Where the keys are a part of the row's, the LSE given is the whole row's, and so is the sum wanted. Equal but for
  // rounding: the keys are all there are.
  constexpr float kRounding = 4 * std::numeric_limits<float>::epsilon();
  for (std::ptrdiff_t row = 0; row < tiles * kTileQ; ++row) {
    const float largest = s.largest[row] * job.scale;
    if (const float sink = job.sink(s.tiles[row / kTileQ].head[row % kTileQ]); std::isfinite(sink)) {
      s.sum[row] += std::exp(sink - largest);
    }
    const float own = largest + std::log(s.sum[row]);
    const float beyond = s.lse[row] - own;
    if (std::isfinite(own) && std::abs(beyond) > kRounding * std::abs(own)) s.sum[row] *= std::exp(beyond);
  }
}

// The weight of a score: from the LSE, or as in forward from the row's maximum and sum.
struct WeightFromLse {
  VecF scale, lse;
  Exp2 exp2;

  WeightFromLse(const Job& job, const BackwardScratch& s, std::ptrdiff_t row)
      : scale(hn::Set(kF32, job.scale)), lse(hn::Load(kF32, s.lse + row)), exp2(1.44269504f) {}  // log2(e)
  VecF operator()(VecF score) const { return exp2(hn::MulSub(score, scale, lse)); }
};

struct WeightFromSum {
  WeightFromLse near;  // of the tile's other rows: a row's bits do not depend on its neighbours
  MaskF far;
  VecF largest, per_sum;
  Exp2 exp2;

  WeightFromSum(const Job& job, const BackwardScratch& s, std::ptrdiff_t row)
      : near(job, s, row),
        far(hn::Ge(hn::Abs(near.lse), hn::Set(kF32, kFarLse))),
        largest(hn::Load(kF32, s.largest + row)),
        per_sum(hn::Div(hn::Set(kF32, 1.0f), hn::Load(kF32, s.sum + row))),
        exp2(job.scale_log2()) {
    // A row without a key, or past the end: its weights are zero.
    const MaskF none = hn::Eq(largest, minus_infinity());
    largest = hn::IfThenZeroElse(none, largest);
    per_sum = hn::IfThenZeroElse(none, per_sum);
  }
  VecF operator()(VecF score) const {
    return hn::IfThenElse(far, hn::Mul(exp2(hn::Sub(score, largest)), per_sum), near(score));
  }
};

// What dS is the gradient of: the scores that are weighed, or the products q.k that they are made of.
enum class GradientOf { scores, products };

// Scores -> weights and dO V^T -> dS, for the keys of `span`, kept or not: only kept ones are read later.
template <class Weight>
inline void plain_gradients(const Job& job, const KeySpan& span, const BackwardScratch& s, std::ptrdiff_t tile,
                            GradientOf what) {
  ScoreTile& scores = s.prune->scores;
  ScoreTile& d_weights = *s.d_weights;
  const VecF scale = hn::Set(kF32, what == GradientOf::products ? static_cast<float>(job.g.scale) : 1.0f);
  for (int v = 0; v < kVecsQ; ++v) {
    const int row = v * kLanes;
    const Weight weight_of(job, s, tile * kTileQ + row);
    const VecF row_delta = hn::Load(kF32, s.delta + tile * kTileQ + row);
    for (int key = span.first; key < span.last; ++key) {
      const VecF weight = weight_of(hn::Load(kF32, &scores.value[key][row]));
      const VecF d_weight = hn::Load(kF32, &d_weights.value[key][row]);
      hn::Store(weight, kF32, &scores.value[key][row]);
      hn::Store(hn::Mul(hn::Mul(weight, scale), hn::Sub(d_weight, row_delta)), kF32, &d_weights.value[key][row]);
    }
  }
}

// Multiplies what belongs to weights by dropout's factors.
inline void drop_factors(const Job& job, const KeySpan& span, const BackwardScratch& s, std::ptrdiff_t tile,
                         std::int64_t block, ScoreTile& values) {
  const U32 du;
  const DropoutFactors factors(job.dropout);
  for (int v = 0; v < kVecsQ; ++v) {
    const int row = v * kLanes;
    const auto states = hn::LoadU(du, s.tiles[tile].dropout + row);
    for (int key = span.first; key < span.last; ++key) {
      const VecF factor = factors(states, hn::Set(du, static_cast<std::uint32_t>(block + key)));
      hn::Store(hn::Mul(hn::Load(kF32, &values.value[key][row]), factor), kF32, &values.value[key][row]);
    }
  }
}

// What a soft cap lets through of dS.
inline void multiply_slopes(const Job& job, const KeySpan& span, const BackwardScratch& s) {
  const SoftCap soft_cap(job);
  for (int key = span.first; key < span.last; ++key) {
    for (int v = 0; v < kVecsQ; ++v) {
      float* d_score = &s.d_weights->value[key][v * kLanes];
      const VecF slope = soft_cap.slope(hn::Load(kF32, &s.prune->capped.value[key][v * kLanes]));
      hn::Store(hn::Mul(hn::Load(kF32, d_score), slope), kF32, d_score);
    }
  }
}

// What the rows of a tile keep, before their scores become weights: nothing past the tile's last row, whose products
// with an infinite key are NaN; and of a NaN row every key that it sees.
inline void correct_kept(const BackwardScratch& s, std::ptrdiff_t t, const KeySpan& span) {
  const int rows = s.tiles[t].rows;
  if (rows == kTileQ && s.nan[t] == 0) return;
  const std::uint32_t real = rows == kTileQ ? ~0u : (1u << rows) - 1;
  for (int key = span.first; key < span.last; ++key) {
    s.kept->rows[key] &= real;
    for (std::uint32_t bits = s.nan[t]; bits != 0; bits &= bits - 1) {
      const float score = s.prune->scores.value[key][std::countr_zero(bits)];
      if (score != -std::numeric_limits<float>::infinity()) s.kept->rows[key] |= bits & (~bits + 1);
    }
  }
}

// Weights and dS of the NaN rows of a tile.
inline void set_nan_rows(const BackwardScratch& s, std::ptrdiff_t t, const KeySpan& span) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (std::uint32_t bits = s.nan[t]; bits != 0; bits &= bits - 1) {
    for (int key = span.first; key < span.last; ++key) {
      s.prune->scores.value[key][std::countr_zero(bits)] = kNan;
      s.d_weights->value[key][std::countr_zero(bits)] = kNan;
    }
  }
}

// Scores of a tile -> the weights that V met, and dO V^T -> dS.
inline void tile_gradients(const Job& job, const KeySpan& span, const BackwardScratch& s, std::ptrdiff_t tile,
                           std::int64_t block, GradientOf what) {
  if (job.dropout.active) drop_factors(job, span, s, tile, block, *s.d_weights);
  s.far[tile] ? plain_gradients<WeightFromSum>(job, span, s, tile, what)
              : plain_gradients<WeightFromLse>(job, span, s, tile, what);
  if (job.dropout.active) drop_factors(job, span, s, tile, block, s.prune->scores);
  if (job.soft_cap > 0 && what == GradientOf::products) multiply_slopes(job, span, s);
  set_nan_rows(s, tile, span);
}

}  // namespace dspattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
