// The fast CPU attention, backward: the gradients of O with the selection that forward made.
//
//   P = exp(S - lse) on kept scores, delta = sum(dO * O) - dLSE per row, dS = P * (dO V^T - delta) * scale
//   dV = P^T dO,   dQ = dS K,   dK = dS^T Q
//
// With dropout's factors f: dV = (f P)^T dO and dS = P * (f dO V^T - delta) * scale; a soft cap multiplies dS by its
// slope. Gradients of biases and sinks are passes of their own (bias_gradient.h, sink_gradient.h).
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

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "cpu/backward-inl.h"
#include "cpu/backward_job.h"
#include "cpu/bias_gradient.h"
#include "cpu/job.h"
#include "cpu/load-inl.h"
#include "cpu/parallel.h"
#include "cpu/products-inl.h"
#include "cpu/prune-inl.h"
#include "cpu/sink_gradient.h"
#include "cpu/tail.h"
#include "cpu/tile.h"

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {

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
      tile_gradients(job, span, s, t, block, GradientOf::products);
      values_by_slot(run.qk.width, d_scores, slots, s.d_scores[t]);
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
  if (args.d_bias.present()) bias_gradient(args);
  if (args.d_sinks.present()) sink_gradient(args);
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
