// The fast CPU attention, backward: the gradients of O with the selection that forward made.
//
//   P = exp(S - lse) on kept scores, delta = sum(dO * O) per row, dS = P * (dO V^T - delta) * scale
//   dV = P^T dO,   dQ = dS K,   dK = dS^T Q
//
// Scores, masks and the choice are recomputed by the code forward uses, so the selection is the same to the last bit.
// A row that forward gave NaN has no selection: its dQ is NaN, and so are dK and dV of every key that it sees.
// Where the LSE is so large that fp32 cannot hold its last digits (biases of finfo.min leave one of -3e38), the row's
// maximum and sum are recomputed likewise, before the gradients.
// dO V^T is a full product (at full speed: it has the shape of the scores); the three others run over kept keys only.
//
// A task owns some of the query rows of one (sequence, kv head): it writes their dQ and sums their share of dK and dV
// in a buffer of its own. A (sequence, kv head) is cut into several tasks only where the problem has few of them; their
// shares are then added in order. The cut depends on the problem alone and nothing is added concurrently, so the result
// has the same bits for any number of threads.
#include "cpu/backward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward.cpp"
// The order of the next three matters: simd.h chooses the targets that foreach_target.h compiles this file for.
// clang-format off
#include "cpu/simd.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "cpu/backward_job.h"
#include "cpu/job.h"
#include "cpu/load-inl.h"
#include "cpu/parallel.h"
#include "cpu/products-inl.h"
#include "cpu/prune-inl.h"
#include "cpu/select-inl.h"
#include "cpu/softmax-inl.h"
#include "cpu/tail.h"
#include "cpu/tile.h"

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {

// Reads what the rows of tile `t` need: q, dO, lse and delta.
void load_tile(const BackwardJob& run, const SequenceSpan& sequence, const BackwardScratch& s, std::ptrdiff_t t) {
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
    lse[r] = static_cast<const float*>(
        run.lse.data)[sequence.batch * run.lse.step(0) + tile.head[r] * run.lse.step(1) + row * run.lse.step(2)];
    widen_row(run.out.at(sequence.batch, tile.head[r], row), run.out.dtype, run.pv.columns, s.row);
    VecF sum = hn::Zero(kF32);
    for (int x = 0; x < run.pv.padded; x += kLanes) {
      sum = hn::MulAdd(hn::Load(kF32, s.row + x), hn::Load(kF32, d_out + r * run.pv.padded + x), sum);
    }
    delta[r] = hn::GetLane(hn::SumOfLanes(kF32, sum));
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
void find_far_sums(const BackwardJob& run, const SequenceSpan& sequence, std::int64_t kv_head, std::ptrdiff_t tiles,
                   std::int64_t first_block, std::int64_t end, const BackwardScratch& s) {
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
    const float own = s.largest[row] * job.scale + std::log(s.sum[row]);
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

// Scores -> weights and dO V^T -> dS times scale, for the keys of `span`, kept or not: only kept ones are read later.
template <class Weight>
void tile_gradients(const Job& job, const KeySpan& span, const BackwardScratch& s, std::ptrdiff_t tile) {
  ScoreTile& scores = s.prune->scores;
  ScoreTile& d_weights = *s.d_weights;
  const VecF scale = hn::Set(kF32, static_cast<float>(job.g.scale));
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

// What the rows of a tile keep, before their scores become weights: nothing past the tile's last row, whose products
// with an infinite key are NaN; and of a NaN row every key that it sees.
void correct_kept(const BackwardScratch& s, std::ptrdiff_t t, const KeySpan& span) {
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
void set_nan_rows(const BackwardScratch& s, std::ptrdiff_t t, const KeySpan& span) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (std::uint32_t bits = s.nan[t]; bits != 0; bits &= bits - 1) {
    for (int key = span.first; key < span.last; ++key) {
      s.prune->scores.value[key][std::countr_zero(bits)] = kNan;
      s.d_weights->value[key][std::countr_zero(bits)] = kNan;
    }
  }
}

// dS by slot, for dQ. A slot without a key finds the zeros of the tile's last row.
void slot_gradients(int width, const ScoreTile& d_scores, const Slots& slots, SlotValues& by_slot) {
  const hn::Rebind<std::uint16_t, I32> narrow;
  int log2_width = 0;
  while ((1 << log2_width) < width) ++log2_width;
  for (int s = 0; s < slots.count; ++s) {
    for (int v = 0; v < kVecsQ; ++v) {
      const int row = v * kLanes;
      const VecI key = hn::ShiftRightSame(hn::PromoteTo(kI32, hn::Load(narrow, &slots.offset[s][row])), log2_width);
      const VecI index = hn::Add(hn::Mul(key, hn::Set(kI32, kTileQ)), hn::Iota(kI32, row));
      hn::Store(hn::GatherIndex(kF32, &d_scores.value[0][0], index), kF32, &by_slot.at[s][row]);
    }
  }
}

// Adds what the rows of a tile contribute to dV and dK of the keys of `span`.
void add_key_gradients(const BackwardJob& run, const KeptRows& kept, const KeySpan& span, const ScoreTile& weights,
                       const ScoreTile& d_scores, const float* d_out, const float* q, float* d_v, float* d_k) {
  const std::ptrdiff_t width = run.qk.width;
  const auto sum = [](const ScoreTile& values, const float* rows, const PanelShape& shape, int p, float* panels) {
    return KeySum{&values, rows + p * shape.width, shape.padded,
                  panels + static_cast<std::size_t>(p) * shape.panel_elems()};
  };
  if (run.qk.padded == run.pv.padded) {
    for (int p = 0; p < run.qk.panels; ++p) {
      const KeySum sums[2] = {sum(weights, d_out, run.pv, p, d_v), sum(d_scores, q, run.qk, p, d_k)};
      gather_kept<2>(kept, span.first, span.last, run.qk.columns_of(p), width, sums);
    }
    return;
  }
  for (int p = 0; p < run.pv.panels; ++p) {
    const KeySum d_v_sum = sum(weights, d_out, run.pv, p, d_v);
    gather_kept<1>(kept, span.first, span.last, run.pv.columns_of(p), width, &d_v_sum);
  }
  for (int p = 0; p < run.qk.panels; ++p) {
    const KeySum d_k_sum = sum(d_scores, q, run.qk, p, d_k);
    gather_kept<1>(kept, span.first, span.last, run.qk.columns_of(p), width, &d_k_sum);
  }
}

// Rows [begin, end) of the (sequence, kv head): their dQ, and their part of dK and dV added to `share`.
void backward_chunk(const BackwardJob& run, const SequenceSpan& sequence, std::int64_t kv_head, std::int64_t begin,
                    std::int64_t end, const BackwardScratch& s, float* share) {
  const Job& job = run.job;
  const std::ptrdiff_t qk_tile = static_cast<std::ptrdiff_t>(run.qk.padded) * kTileQ;
  const std::ptrdiff_t pv_tile = static_cast<std::ptrdiff_t>(run.pv.padded) * kTileQ;
  const std::ptrdiff_t tile_count = (end - begin + kTileQ - 1) / kTileQ;
  std::int64_t least_begin = sequence.n_k, most_end = 0;
  for (std::ptrdiff_t t = 0; t < tile_count; ++t) {
    s.tiles[t].set(job, sequence, kv_head, begin + t * kTileQ, end);
    load_tile(run, sequence, s, t);
    if (s.tiles[t].most_end > s.tiles[t].least_begin) {
      least_begin = std::min(least_begin, s.tiles[t].least_begin);
      most_end = std::max(most_end, s.tiles[t].most_end);
    }
  }
  const std::int64_t first_block = least_begin / job.block_keys * job.block_keys;
  if (std::any_of(s.far, s.far + tile_count, [](bool far) { return far; })) {
    find_far_sums(run, sequence, kv_head, tile_count, first_block, most_end, s);
  }
  std::fill_n(s.d_q, tile_count * qk_tile, 0.0f);
  std::fill_n(s.d_weights->value[kTileK], kTileQ, 0.0f);

  alignas(64) float ones[kTileQ];
  std::fill_n(ones, kTileQ, 1.0f);
  for (std::int64_t block = first_block; block < most_end; block += job.block_keys) {
    const int keys = static_cast<int>(std::min<std::int64_t>(job.block_keys, sequence.n_k - block));
    fill_panels(job.k.at(sequence.batch, kv_head, sequence.k_begin + block), job.k.dtype, job.k.row_bytes, keys, run.qk,
                s.row, s.k_panels);
    fill_panels(job.v.at(sequence.batch, kv_head, sequence.k_begin + block), job.v.dtype, job.v.row_bytes, keys, run.pv,
                s.row, s.v_panels);
    float* d_k = share + static_cast<std::size_t>(block / job.block_keys) * run.block_elems();
    float* d_v = d_k + run.qk.elems();
    for (std::ptrdiff_t t = 0; t < tile_count; ++t) {
      Slots& slots = s.slots[t];
      if (!prune_tile(job, sequence, s.tiles[t], s.q_packed + t * qk_tile, KeyRows::of(s.k_panels, run.qk), block,
                      run.qk.width, *s.prune, slots, s.kept)) {
        slots.count = 0;
        continue;
      }
      const KeySpan span = visible_keys(job, s.tiles[t], block);
      correct_kept(s, t, span);
      ScoreTile& weights = s.prune->scores;
      ScoreTile& d_scores = *s.d_weights;
      tile_product(KeyRows::of(s.v_panels, run.pv), s.d_out_packed + t * pv_tile, span.first, span.computed(),
                   d_scores);
      s.far[t] ? tile_gradients<WeightFromSum>(job, span, s, t) : tile_gradients<WeightFromLse>(job, span, s, t);
      set_nan_rows(s, t, span);
      slot_gradients(run.qk.width, d_scores, slots, s.d_scores[t]);
      add_key_gradients(run, *s.kept, span, weights, d_scores, s.d_out_rows + t * pv_tile, s.q_rows + t * qk_tile, d_v,
                        d_k);
    }
    // A panel of K stays in the first cache level while every tile meets it.
    for (int p = 0; p < run.qk.panels; ++p) {
      for (std::ptrdiff_t t = 0; t < tile_count; ++t) {
        if (s.slots[t].count == 0) continue;
        add_kept(s.slots[t], s.d_scores[t], s.k_panels, run.qk, p, ones, s.tiles[t].rows, s.d_q + t * qk_tile);
      }
    }
  }
  for (std::ptrdiff_t t = 0; t < tile_count; ++t) {
    const TileRows& tile = s.tiles[t];
    for (int r = 0; r < tile.rows; ++r) {
      const float factor = (s.nan[t] >> r & 1) != 0 ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
      narrow_row(s.d_q + t * qk_tile + static_cast<std::ptrdiff_t>(r) * run.qk.padded, factor, run.d_q.dtype,
                 run.qk.columns,
                 run.d_q.writable_at(sequence.batch, tile.head[r], sequence.q_begin + tile.position[r]));
    }
  }
}

// One key's row of a gradient: its shares added in order, narrowed and written.
void write_key(const PanelShape& shape, const float* panels, std::size_t share_stride, std::int64_t shares, int key,
               DType dtype, void* destination) {
  HWY_ALIGN float row[kMaxHeadDim];
  for (int p = 0; p < shape.panels; ++p) {
    const float* from = panels + static_cast<std::size_t>(p) * shape.panel_elems() + key * shape.width;
    for (int x = 0; x < shape.columns_of(p); x += kLanes) {
      VecF sum = hn::Load(kF32, from + x);
      for (std::int64_t part = 1; part < shares; ++part) {
        sum = hn::Add(sum, hn::Load(kF32, from + static_cast<std::size_t>(part) * share_stride + x));
      }
      hn::Store(sum, kF32, row + p * shape.width + x);
    }
  }
  narrow_row(row, 1.0f, dtype, shape.columns, destination);
}

// dK and dV of one block of keys, from its shares.
void write_block(const BackwardJob& run, const SequenceSpan& sequence, std::int64_t kv_head, std::int64_t block_index,
                 const float* shares, std::size_t share_stride) {
  const float* d_k = shares + static_cast<std::size_t>(block_index) * run.block_elems();
  const float* d_v = d_k + run.qk.elems();
  const std::int64_t first = block_index * run.job.block_keys;
  for (int key = 0; key < run.job.block_keys && first + key < sequence.n_k; ++key) {
    const std::int64_t row = sequence.k_begin + first + key;
    write_key(run.qk, d_k, share_stride, run.parts, key, run.d_k.dtype,
              run.d_k.writable_at(sequence.batch, kv_head, row));
    write_key(run.pv, d_v, share_stride, run.parts, key, run.d_v.dtype,
              run.d_v.writable_at(sequence.batch, kv_head, row));
  }
}

// `share` is where dK and dV of this task are to be left for the others of its (sequence, kv head); null when it is the
// only one and writes them itself.
void backward_task(const BackwardJob& run, const BackwardTask& task, float* share) {
  const SequenceSpan sequence = run.job.sequence(task.sequence);
  const std::size_t share_elems = run.share_elems(sequence.n_k);
  Carver measure(nullptr);
  BackwardScratch(measure, run, share == nullptr ? share_elems : 0);
  Carver carver(thread_scratch(measure.bytes()));
  const BackwardScratch s(carver, run, share == nullptr ? share_elems : 0);
  float* sums = share == nullptr ? s.share : share;
  std::fill_n(sums, share_elems, 0.0f);
  const std::int64_t rows = run.job.rows_of(sequence);
  for (std::int64_t begin = task.part * kChunkRows; begin < rows; begin += run.parts * kChunkRows) {
    backward_chunk(run, sequence, task.kv_head, begin, std::min(begin + kChunkRows, rows), s, sums);
  }
  if (share != nullptr) return;
  for (std::int64_t block = 0; block < run.blocks_of(sequence.n_k); ++block) {
    write_block(run, sequence, task.kv_head, block, sums, share_elems);
  }
}

}  // namespace dspattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dspattn::cpu {

HWY_EXPORT(backward_task);
HWY_EXPORT(write_block);

void fast_backward(const BackwardArgs& args) {
  finish_tail(args);
  const BackwardJob run(args);
  std::vector<BackwardTask> tasks;
  for (std::int64_t b = 0; b < run.job.g.batch; ++b) {
    for (std::int64_t head = 0; head < run.job.g.kv_heads; ++head) {
      for (std::int64_t part = 0; part < run.parts; ++part) tasks.push_back({b, head, part});
    }
  }
  const std::size_t share_elems = run.share_elems(run.job.g.n_k);
  std::unique_ptr<float, decltype(&std::free)> shares(nullptr, &std::free);
  if (run.parts > 1 && share_elems > 0) {
    shares.reset(static_cast<float*>(std::aligned_alloc(64, tasks.size() * share_elems * sizeof(float))));
    if (!shares) throw std::bad_alloc();
  }
  const auto task = HWY_DYNAMIC_DISPATCH(backward_task);
  parallel_for(static_cast<std::int64_t>(tasks.size()), args.run, [&](std::int64_t i) {
    const std::size_t index = static_cast<std::size_t>(i);
    task(run, tasks[index], shares ? shares.get() + index * share_elems : nullptr);
  });
  if (!shares) return;
  const auto write = HWY_DYNAMIC_DISPATCH(write_block);
  const std::int64_t blocks = run.blocks_of(run.job.g.n_k);
  const std::int64_t owners = run.job.g.batch * run.job.g.kv_heads;
  parallel_for(owners * blocks, args.run, [&](std::int64_t i) {
    const BackwardTask& owner = tasks[static_cast<std::size_t>(i / blocks * run.parts)];
    const SequenceSpan sequence = run.job.sequence(owner.sequence);
    if (i % blocks >= run.blocks_of(sequence.n_k)) return;
    write(run, sequence, owner.kv_head, i % blocks,
          shares.get() + static_cast<std::size_t>(i / blocks * run.parts) * share_elems, share_elems);
  });
}

}  // namespace dspattn::cpu
#endif  // HWY_ONCE
