// The fast CPU attention, forward: O = softmax(prune(scale Q K^T + bias)) V without an n^2 buffer.
//
// A task is up to 256 query rows that share a kv head. It walks over blocks of up to 128 keys; each block of K and V is
// widened to fp32 once per task and then met by the task's tiles of 32 rows:
//   prune_tile   scores of the tile, masks, the choice within each group -> slots (score, key) per row
//   weigh        online softmax over the slots; dropout of what it leaves
//   add_kept     output += weights * V over the slots only
// With rest = mean the pruned scores are exponentiated, too, and their sum brings the mean of V to the row (rest.h).
// A row's arithmetic does not depend on which rows share its tile or task, so neither the number of threads nor the cut
// into tasks changes a bit of the result.
//
// The sum is divided by that of the weights at its end, so it may leave fp32's range where their quotient does not. A
// task in which one did is worked out again with V times 2^-64, for the elements that the first pass has no number for.
#include "cpu/forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cpp"
// The order of the next three matters: simd.h chooses the targets that foreach_target.h compiles this file for.
// clang-format off
#include "cpu/simd.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <optional>

#include "core/half.h"
#include "cpu/job.h"
#include "cpu/load-inl.h"
#include "cpu/parallel.h"
#include "cpu/products-inl.h"
#include "cpu/prune-inl.h"
#include "cpu/rest-inl.h"
#include "cpu/rest.h"
#include "cpu/select-inl.h"
#include "cpu/shared-inl.h"
#include "cpu/shared.h"
#include "cpu/softmax-inl.h"
#include "cpu/tail.h"
#include "cpu/tile.h"

#ifndef DSPATTN_CPU_FORWARD_SHARED_
#define DSPATTN_CPU_FORWARD_SHARED_
namespace dspattn::cpu {

// What V is multiplied by where sums of it leave fp32's range: fewer than 2^32 weights, each at most 1 or, with
// dropout, 2^24, keep them in it then. What becomes subnormal is too small to be seen beside what left the range.
inline constexpr float kShrink = 0x1p-64f;

// Tiles of a task: K and V are widened once for this many. 512 rows of q and of the output at d = 128 are 512 KiB,
// which a core's L2 still holds.
inline constexpr std::int64_t kTaskTiles = 16;

struct ForwardJob {
  explicit ForwardJob(const ForwardArgs& args)
      : job(args.problem), out(args.out), lse(args.lse), qk(PanelShape::of(job.g.d)), pv(PanelShape::of(job.g.d_v)) {
    if (job.pattern.is_dense()) return;  // nothing is pruned
    if (args.problem.rest == Rest::mean) sums.emplace(job, pv);
    if (args.problem.choice == dspattn::Choice::shared) {
      totals.emplace(args.problem);
      tile_rows = static_cast<int>(kTileQ / job.group_heads * job.group_heads);
    }
  }

  Job job;
  Rows out;
  TensorView lse;  // may be absent
  PanelShape qk, pv;
  std::optional<BlockSums> sums;    // with rest = mean, where something may be pruned
  std::optional<RowTotals> totals;  // with choice = shared, likewise
  int tile_rows = kTileQ;           // heads that choose together are in one tile
};

// What a task works with, laid out in the thread's scratch memory.
struct ForwardScratch {
  PruneScratch* prune;
  Slots* slots;     // [tiles]
  TileRows* tiles;  // [tiles]
  float* packed;    // [tiles][qk.padded][kTileQ]: q transposed
  float* acc;       // [tiles][kTileQ][pv.padded]
  float* largest;   // [tiles][kTileQ]
  float* sum;       // [tiles][kTileQ]
  float* rescale;   // [tiles][kTileQ]
  float* rest;      // [tiles][kTileQ]: as sum, of the pruned keys; 0 when they are dropped
  float* has_nan;   // [tiles][kTileQ]
  float* mean;      // [pv.padded]
  float* rows;      // [kTileQ][qk.padded or pv.padded]
  float* k_panels;
  float* v_panels;

  ForwardScratch(Carver& carver, const ForwardJob& run, std::size_t tile_count) {
    constexpr std::size_t kRows = kTileQ;
    const std::size_t qk_tile = kRows * static_cast<std::size_t>(run.qk.padded);
    const std::size_t pv_tile = kRows * static_cast<std::size_t>(run.pv.padded);
    prune = carver.take<PruneScratch>(1);
    slots = carver.take<Slots>(tile_count);
    tiles = carver.take<TileRows>(tile_count);
    packed = carver.take<float>(tile_count * qk_tile);
    acc = carver.take<float>(tile_count * pv_tile);
    largest = carver.take<float>(tile_count * kRows);
    sum = carver.take<float>(tile_count * kRows);
    rescale = carver.take<float>(tile_count * kRows);
    rest = carver.take<float>(tile_count * kRows);
    has_nan = carver.take<float>(tile_count * kRows);
    mean = carver.take<float>(static_cast<std::size_t>(run.pv.padded));
    rows = carver.take<float>(std::max(qk_tile, pv_tile));
    k_panels = carver.take<float>(run.qk.elems());
    v_panels = carver.take<float>(run.pv.elems());
  }
};

}  // namespace dspattn::cpu
#endif  // DSPATTN_CPU_FORWARD_SHARED_

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {

// What a sink does to the sum of a row's exponentials, which are relative to the row's largest score.
struct SinkShare {
  float logit;
  float origin;          // what exponentials are relative to with the sink: the larger of the two
  float of_keys = 1.0f;  // factor of the keys' exponentials
  float of_sink = 0.0f;  // the sink's own
  bool undefined = false;

  SinkShare(float sink, float largest) : logit(sink), origin(largest) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    undefined = !(sink < kInfinity);
    if (sink == -kInfinity || undefined) return;
    origin = std::max(sink, largest);
    of_keys = std::exp(largest - origin);
    of_sink = std::exp(sink - origin);
  }
  float total(float sum) const { return sum * of_keys + of_sink; }
};

// Adds to each row's output what its pruned keys bring: their weight times the mean of V. `row` is a buffer.
void add_means(const ForwardJob& run, const SequenceSpan& sequence, const TileRows& tile, const float* rest,
               float shrink, float* row, float* mean, float* acc) {
  int last = -1;  // the row whose mean is at hand
  for (int r = 0; r < tile.rows; ++r) {
    if (rest[r] == 0.0f) continue;
    const bool at_hand = last >= 0 && tile.head[r] == tile.head[last] && tile.begin[r] == tile.begin[last] &&
                         tile.end[r] == tile.end[last];
    if (!at_hand) {
      mean_of_values(run.job, sequence, *run.sums, tile.head[r], tile.begin[r], tile.end[r], run.pv, shrink, row, mean);
    }
    last = r;
    float* out = acc + static_cast<std::ptrdiff_t>(r) * run.pv.padded;
    const VecF weight = hn::Set(kF32, rest[r]);
    for (int x = 0; x < run.pv.padded; x += kLanes) {
      hn::Store(hn::MulAdd(weight, hn::Load(kF32, mean + x), hn::Load(kF32, out + x)), kF32, out + x);
    }
  }
}

// Whether all numbers are finite, of rows padded to a multiple of kPad.
bool is_finite(const float* HWY_RESTRICT values, std::ptrdiff_t count) {
  const VecF zero = hn::Zero(kF32);  // times which a number is 0, or NaN
  VecF sum = zero;
  for (std::ptrdiff_t x = 0; x < count; x += kPad) {
    HWY_UNROLL(16)
    for (int lane = 0; lane < kPad; lane += kLanes) sum = hn::MulAdd(hn::Load(kF32, values + x + lane), zero, sum);
  }
  return hn::AllFalse(kF32, hn::IsNaN(sum));
}

// As narrow_row, of a row of shrunken values, where the destination has no finite number and the row has one. `buffer`
// is two rows long.
void narrow_shrunken(const ForwardJob& run, const float* row, float factor, float* buffer, void* destination) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  const int columns = run.pv.columns;
  const auto elem_bytes = static_cast<std::size_t>(size_bytes(run.out.dtype));
  std::fill_n(buffer, run.pv.padded, 0.0f);
  for (int x = 0; x < columns; ++x) {
    buffer[x] = row[x] * factor / kShrink;
    // Weights that add up to 1 make nothing larger than the largest value: beyond the range it is rounding.
    if (std::isfinite(row[x]) && !run.job.dropout.active) buffer[x] = std::clamp(buffer[x], -kLargest, kLargest);
  }
  auto* narrow = reinterpret_cast<unsigned char*>(buffer + run.pv.padded);
  narrow_row(buffer, 1.0f, run.out.dtype, columns, narrow);
  for (int x = 0; x < columns; ++x) {
    if (!std::isfinite(row[x]) || std::isfinite(core::load_element(destination, run.out.dtype, x))) continue;
    const std::size_t at = static_cast<std::size_t>(x) * elem_bytes;
    std::memcpy(static_cast<unsigned char*>(destination) + at, narrow + at, elem_bytes);
  }
}

// Divides by the sum of exponentials and writes the rows of a tile, the t-th of the task. With values that are shrunken
// it writes what had no finite number before, and nothing else. False: a row has left fp32's range.
bool finish_tile(const ForwardJob& run, const SequenceSpan& sequence, const ForwardScratch& s, int t, float shrink) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const TileRows& tile = s.tiles[t];
  float* acc = s.acc + t * static_cast<std::ptrdiff_t>(run.pv.padded) * kTileQ;
  if (run.sums) add_means(run, sequence, tile, s.rest + t * kTileQ, shrink, s.rows, s.mean, acc);
  const bool all_finite = is_finite(acc, static_cast<std::ptrdiff_t>(tile.rows) * run.pv.padded);
  bool in_range = true;
  for (int r = 0; r < tile.rows; ++r) {
    const std::int64_t row = sequence.q_begin + tile.position[r];
    constexpr float kLargest = std::numeric_limits<float>::max();
    const float largest = s.largest[t * kTileQ + r];
    const float sum = s.sum[t * kTileQ + r] + s.rest[t * kTileQ + r];
    const bool has_nan =
        s.has_nan[t * kTileQ + r] != 0.0f ||
        (run.totals && std::isnan(run.totals->largest(run.totals->index(sequence, tile.head[r], tile.position[r]))));
    const float top = std::isfinite(largest) ? std::clamp(largest * run.job.scale, -kLargest, kLargest) : largest;
    const SinkShare sink(run.job.sink(tile.head[r]), top);
    const bool empty = largest == -kInfinity && !has_nan;
    // An infinite score has no weight relative to the others: infinity minus infinity.
    const bool undefined = has_nan || largest == kInfinity || sink.undefined;
    const float total = sink.total(sum);
    const float factor = undefined ? kNan : empty ? 0.0f : sink.of_keys / total;
    const float* values = acc + static_cast<std::ptrdiff_t>(r) * run.pv.padded;
    void* out = run.out.writable_at(sequence.batch, tile.head[r], row);
    if (shrink != 1.0f) {
      if (!undefined && !empty) narrow_shrunken(run, values, factor, s.rows, out);
      continue;
    }
    narrow_row(values, factor, run.out.dtype, run.pv.columns, out);
    if (!all_finite && !undefined && !is_finite(values, run.pv.padded)) in_range = false;
    if (run.lse.present()) {
      float* lse = static_cast<float*>(run.lse.data) + sequence.batch * run.lse.step(0) +
                   tile.head[r] * run.lse.step(1) + row * run.lse.step(2);
      // One that fp32 cannot hold is its largest number: only a row without a key has an infinite LSE.
      const float defined = std::clamp(sink.origin + std::log(total), -kLargest, kLargest);
      *lse = undefined ? kNan : empty ? sink.logit : defined;
    }
  }
  return in_range;
}

// Multiplies the rows of the keys in panels of V.
void shrink_panels(const PanelShape& shape, int keys, float shrink, float* panels) {
  for (int p = 0; p < shape.panels; ++p) {
    float* panel = panels + static_cast<std::ptrdiff_t>(p) * static_cast<std::ptrdiff_t>(shape.panel_elems());
    for (int key = 0; key < keys; ++key) {
      float* row = panel + static_cast<std::ptrdiff_t>(key) * shape.width;
      for (int x = 0; x < shape.columns_of(p); ++x) row[x] *= shrink;
    }
  }
}

// Sum `index` of those that the means are made of.
void sum_block(const ForwardJob& run, std::int64_t index, BlockSums& sums) {
  Carver measure(nullptr);
  measure.take<float>(static_cast<std::size_t>(run.pv.padded));
  Carver carver(thread_scratch(measure.bytes()));
  fill_block_sum(run.job, index, run.pv, carver.take<float>(static_cast<std::size_t>(run.pv.padded)), sums);
}

// The totals of a task's rows, tile by tile: what a dense pattern would divide by. `dense` is the job with that.
void total_task(const ForwardJob& run, const Job& dense, const Task& task, RowTotals& totals) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const SequenceSpan sequence = dense.sequence(task.sequence);
  Carver measure(nullptr);
  ForwardScratch(measure, run, 1);
  Carver carver(thread_scratch(measure.bytes()));
  const ForwardScratch s(carver, run, 1);
  TileRows& tile = *s.tiles;
  for (std::int64_t first = task.begin; first < task.end; first += kTileQ) {
    tile.set(dense, sequence, task.kv_head, first, task.end);
    pack_tile(dense.q, sequence, tile, run.qk, s.rows, s.packed);
    std::fill_n(s.largest, kTileQ, -kInfinity);
    std::fill_n(s.sum, kTileQ, 0.0f);
    std::fill_n(s.has_nan, kTileQ, 0.0f);
    const std::int64_t begin = tile.least_begin / dense.block_keys * dense.block_keys;
    for (std::int64_t block = begin; block < tile.most_end; block += dense.block_keys) {
      const KeyRows k = keys_of_block(dense, sequence, task.kv_head, block, run.qk, s.rows, s.k_panels);
      if (!prune_tile(dense, sequence, tile, s.packed, k, block, run.pv.width, *s.prune, *s.slots)) continue;
      weigh(*s.slots, dense.scale_log2(), {s.largest, s.sum}, s.rescale);
      for (int r = 0; r < kTileQ; ++r) s.has_nan[r] += s.slots->has_nan[r];
    }
    for (int r = 0; r < tile.rows; ++r) {
      const std::size_t index = totals.index(sequence, tile.head[r], tile.position[r]);
      const bool undefined = s.has_nan[r] != 0.0f || s.largest[r] == kInfinity;
      const bool empty = s.largest[r] == -kInfinity;
      totals.largest(index) = undefined ? std::numeric_limits<float>::quiet_NaN() : s.largest[r];
      totals.factor(index) = undefined || empty ? 0.0f : 1.0f / s.sum[r];
    }
  }
}

// The rows of a task, with `shrink` times V. False: some have left fp32's range.
bool attend(const ForwardJob& run, const Task& task, float shrink) {
  const Job& job = run.job;
  const SequenceSpan sequence = job.sequence(task.sequence);
  const int tile_count = static_cast<int>((task.end - task.begin + run.tile_rows - 1) / run.tile_rows);
  Carver measure(nullptr);
  ForwardScratch(measure, run, static_cast<std::size_t>(tile_count));
  Carver carver(thread_scratch(measure.bytes()));
  const ForwardScratch s(carver, run, static_cast<std::size_t>(tile_count));
  const std::ptrdiff_t qk_tile = static_cast<std::ptrdiff_t>(run.qk.padded) * kTileQ;
  const std::ptrdiff_t pv_tile = static_cast<std::ptrdiff_t>(run.pv.padded) * kTileQ;

  std::int64_t least_begin = sequence.n_k, most_end = 0;
  for (int t = 0; t < tile_count; ++t) {
    const std::int64_t first = task.begin + t * run.tile_rows;
    s.tiles[t].set(job, sequence, task.kv_head, first, std::min(first + run.tile_rows, task.end));
    if (s.tiles[t].most_end > s.tiles[t].least_begin) {
      least_begin = std::min(least_begin, s.tiles[t].least_begin);
      most_end = std::max(most_end, s.tiles[t].most_end);
    }
    pack_tile(job.q, sequence, s.tiles[t], run.qk, s.rows, s.packed + t * qk_tile);
  }
  std::fill_n(s.acc, tile_count * pv_tile, 0.0f);
  std::fill_n(s.largest, tile_count * kTileQ, -std::numeric_limits<float>::infinity());
  std::fill_n(s.sum, tile_count * kTileQ, 0.0f);
  std::fill_n(s.rest, tile_count * kTileQ, 0.0f);
  std::fill_n(s.has_nan, tile_count * kTileQ, 0.0f);

  const float scale_log2 = job.scale_log2();
  for (std::int64_t block = least_begin / job.block_keys * job.block_keys; block < most_end; block += job.block_keys) {
    const int keys = static_cast<int>(std::min<std::int64_t>(job.block_keys, sequence.n_k - block));
    const KeyRows k = keys_of_block(job, sequence, task.kv_head, block, run.qk, s.rows, s.k_panels);
    fill_panels(job.v.at(sequence.batch, task.kv_head, sequence.k_begin + block), job.v.dtype, job.v.row_bytes, keys,
                run.pv, s.rows, s.v_panels);
    if (shrink != 1.0f) shrink_panels(run.pv, keys, shrink, s.v_panels);
    // While a tile computes, its share of the next block travels: from the third cache level on that takes longer than
    // the copy itself.
    const std::int64_t next = block + job.block_keys;
    const std::int64_t coming = std::clamp<std::int64_t>(sequence.n_k - next, 0, next < most_end ? job.block_keys : 0);
    for (int t = 0; t < tile_count; ++t) {
      const std::int64_t from = coming * t / tile_count, to = coming * (t + 1) / tile_count;
      prefetch_rows(job.k.at(sequence.batch, task.kv_head, sequence.k_begin + next), job.k.dtype, job.k.row_bytes, from,
                    to, run.qk.columns);
      prefetch_rows(job.v.at(sequence.batch, task.kv_head, sequence.k_begin + next), job.v.dtype, job.v.row_bytes, from,
                    to, run.pv.columns);
      Slots& slots = s.slots[t];
      std::optional<TileTotals> totals;
      if (run.totals) totals.emplace(*run.totals, sequence, s.tiles[t]);
      if (!prune_tile(job, sequence, s.tiles[t], s.packed + t * qk_tile, k, block, run.pv.width, *s.prune, slots,
                      nullptr, totals ? &*totals : nullptr)) {
        slots.count = 0;
        continue;
      }
      const KeySpan seen = visible_keys(job, s.tiles[t], block);
      if (run.sums) strike_kept(seen, run.pv.width, slots, s.prune->scores);
      weigh(slots, scale_log2, {s.largest + t * kTileQ, s.sum + t * kTileQ}, s.rescale + t * kTileQ);
      if (run.sums) {
        add_rest(seen, s.prune->scores, scale_log2, s.largest + t * kTileQ, s.rescale + t * kTileQ,
                 s.rest + t * kTileQ);
      }
      if (job.dropout.active) drop_slots(job.dropout, s.tiles[t], block, run.pv.width, slots);
      for (int r = 0; r < kTileQ; ++r) s.has_nan[t * kTileQ + r] += slots.has_nan[r];
    }
    // A panel of V stays in the first cache level while every tile meets it; the slots stream by.
    for (int p = 0; p < run.pv.panels; ++p) {
      for (int t = 0; t < tile_count; ++t) {
        if (s.slots[t].count == 0) continue;
        add_kept(s.slots[t], s.slots[t].value, s.v_panels, run.pv, p, s.rescale + t * kTileQ, s.tiles[t].rows,
                 s.acc + t * pv_tile);
      }
    }
  }
  bool in_range = true;
  for (int t = 0; t < tile_count; ++t) in_range = finish_tile(run, sequence, s, t, shrink) && in_range;
  return in_range;
}

void forward_task(const ForwardJob& run, const Task& task) {
  if (!attend(run, task, 1.0f)) attend(run, task, kShrink);
}

}  // namespace dspattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dspattn::cpu {

HWY_EXPORT(forward_task);
HWY_EXPORT(sum_block);
HWY_EXPORT(total_task);

namespace {

// The problem of which the totals are: nothing pruned, and the scores as they are compared, without cap.
Problem all_keys_of(const Problem& problem) {
  Problem all = problem;
  all.pattern = Pattern::dense();
  all.soft_cap.reset();
  return all;
}

}  // namespace

void fast_forward(const ForwardArgs& args) {
  ForwardJob run(args);
  const int threads = args.run.threads > 0 ? args.run.threads : available_cores();
  // Smaller tasks only where larger ones would leave threads idle.
  std::int64_t rows = kTaskTiles * run.tile_rows;
  while (rows > run.tile_rows && run.job.task_count(rows) < 4 * static_cast<std::int64_t>(threads)) rows /= 2;
  const std::vector<Task> tasks = run.job.tasks(rows);
  if (run.sums) {
    const auto sum = HWY_DYNAMIC_DISPATCH(sum_block);
    parallel_for(run.sums->entries(), args.run, [&](std::int64_t i) { sum(run, i, *run.sums); });
  }
  if (run.totals) {
    const Job dense(all_keys_of(args.problem));
    const auto total = HWY_DYNAMIC_DISPATCH(total_task);
    parallel_for(static_cast<std::int64_t>(tasks.size()), args.run,
                 [&](std::int64_t i) { total(run, dense, tasks[static_cast<std::size_t>(i)], *run.totals); });
  }
  const auto task = HWY_DYNAMIC_DISPATCH(forward_task);
  parallel_for(static_cast<std::int64_t>(tasks.size()), args.run,
               [&](std::int64_t i) { task(run, tasks[static_cast<std::size_t>(i)]); });
  finish_tail(args);
}

}  // namespace dspattn::cpu
#endif  // HWY_ONCE
