// dbias = dS summed over the dimensions that the bias is broadcast over.
//
// A task owns a part of the result: queries of one chunk and keys of one block, for one batch entry and one head of the
// bias; all of them where the bias has an extent of 1. It walks over every (sequence, head, tile of queries, block of
// keys) that contributes, in a fixed order, and nobody else adds to its part: the result has the same bits for any
// number of threads. Scores, weights and dS are made once more, by the code that the other gradients are made with.
#include "cpu/bias_gradient.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/bias_gradient.cpp"
// The order of the next three matters: simd.h chooses the targets that foreach_target.h compiles this file for.
// clang-format off
#include "cpu/simd.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/half.h"
#include "cpu/backward-inl.h"
#include "cpu/backward_job.h"
#include "cpu/job.h"
#include "cpu/load-inl.h"
#include "cpu/parallel.h"
#include "cpu/products-inl.h"
#include "cpu/prune-inl.h"
#include "cpu/tile.h"

#ifndef DSPATTN_CPU_BIAS_GRADIENT_SHARED_
#define DSPATTN_CPU_BIAS_GRADIENT_SHARED_
namespace dspattn::cpu {

// A range of the indices that a dimension of the bias stands for.
struct IndexRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

struct BiasJob {
  explicit BiasJob(const BackwardArgs& args) : backward(args), d_bias(args.d_bias) {
    const std::int64_t of_dim[4] = {1, 1, kChunkRows, backward.job.block_keys};
    for (int dim = 0; dim < 4; ++dim) parts[dim] = (d_bias.extent(dim) + of_dim[dim] - 1) / of_dim[dim];
  }
  bool broadcast(int dim) const { return d_bias.extent(dim) == 1; }
  std::int64_t tasks() const { return parts[0] * parts[1] * parts[2] * parts[3]; }
  // Indices of dimension `dim` that part `part` sums or stands for, out of `count`.
  IndexRange range(int dim, std::int64_t part, std::int64_t unit, std::int64_t count) const {
    if (broadcast(dim)) return {0, count};
    return {std::min(part * unit, count), std::min((part + 1) * unit, count)};
  }

  BackwardJob backward;
  TensorView d_bias;
  std::int64_t parts[4] = {};  // tasks along each dimension
};

// The part of the result that a task owns: [keys][queries], one of each where the bias is broadcast.
struct BiasSums {
  double* data = nullptr;
  std::int64_t key_step = 0;
  std::int64_t query_step = 0;

  double& at(std::int64_t key, std::int64_t query) const { return data[key * key_step + query * query_step]; }
};

}  // namespace dspattn::cpu
#endif  // DSPATTN_CPU_BIAS_GRADIENT_SHARED_

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {

// Adds dS of queries [first, last) of one head, with keys [keys.begin, keys.end) of the sequence, at most a chunk.
void add_bias_chunk(const BackwardJob& run, const SequenceSpan& sequence, std::int64_t head, const IndexRange& queries,
                    const IndexRange& keys, const BackwardScratch& s, const BiasSums& sums) {
  const Job& job = run.job;
  const std::int64_t kv_head = head / job.group_heads;
  const std::ptrdiff_t qk_tile = static_cast<std::ptrdiff_t>(run.qk.padded) * kTileQ;
  const std::ptrdiff_t pv_tile = static_cast<std::ptrdiff_t>(run.pv.padded) * kTileQ;
  const std::ptrdiff_t tile_count = (queries.end - queries.begin + kTileQ - 1) / kTileQ;
  std::int64_t least_begin = sequence.n_k, most_end = 0;
  for (std::ptrdiff_t t = 0; t < tile_count; ++t) {
    s.tiles[t].set_head(job, sequence, head, queries.begin + t * kTileQ, queries.end);
    if (s.tiles[t].most_end > s.tiles[t].least_begin) {
      least_begin = std::min(least_begin, s.tiles[t].least_begin);
      most_end = std::max(most_end, s.tiles[t].most_end);
    }
  }
  const std::int64_t first_block = std::max(keys.begin, least_begin / job.block_keys * job.block_keys);
  const std::int64_t end = std::min(keys.end, most_end);
  if (first_block >= end) return;
  for (std::ptrdiff_t t = 0; t < tile_count; ++t) load_tile(run, sequence, s, t);
  if (std::any_of(s.far, s.far + tile_count, [](bool far) { return far; })) {
    find_far_sums(run, sequence, kv_head, tile_count, least_begin / job.block_keys * job.block_keys, most_end, s);
  }
  for (std::int64_t block = first_block; block < end; block += job.block_keys) {
    const int count = static_cast<int>(std::min<std::int64_t>(job.block_keys, sequence.n_k - block));
    fill_panels(job.k.at(sequence.batch, kv_head, sequence.k_begin + block), job.k.dtype, job.k.row_bytes, count,
                run.qk, s.row, s.k_panels);
    fill_panels(job.v.at(sequence.batch, kv_head, sequence.k_begin + block), job.v.dtype, job.v.row_bytes, count,
                run.pv, s.row, s.v_panels);
    for (std::ptrdiff_t t = 0; t < tile_count; ++t) {
      if (!prune_tile(job, sequence, s.tiles[t], s.q_packed + t * qk_tile, KeyRows::of(s.k_panels, run.qk), block,
                      run.qk.width, *s.prune, s.slots[t], s.kept)) {
        continue;
      }
      const KeySpan span = visible_keys(job, s.tiles[t], block);
      correct_kept(s, t, span);
      tile_product(KeyRows::of(s.v_panels, run.pv), s.d_out_packed + t * pv_tile, span.first, span.computed(),
                   *s.d_weights);
      tile_gradients(job, span, s, t, block, GradientOf::scores);
      for (int key = span.first; key < span.last; ++key) {
        for (std::uint32_t bits = s.kept->rows[key]; bits != 0; bits &= bits - 1) {
          const int row = std::countr_zero(bits);
          sums.at(key, t * kTileQ + row) += static_cast<double>(s.d_weights->value[key][row]);
        }
      }
    }
  }
}

void bias_task(const BiasJob& run, std::int64_t index) {
  const Job& job = run.backward.job;
  std::int64_t part[4];
  for (int dim = 3; dim >= 0; --dim) {
    part[dim] = index % run.parts[dim];
    index /= run.parts[dim];
  }
  const std::size_t queries_here = run.broadcast(2) ? 1 : kChunkRows, keys_here = run.broadcast(3) ? 1 : kTileK;
  Carver measure(nullptr);
  BackwardScratch(measure, run.backward, 0);
  measure.take<double>(queries_here * keys_here);
  Carver carver(thread_scratch(measure.bytes()));
  const BackwardScratch s(carver, run.backward, 0);
  BiasSums sums;
  sums.data = carver.take<double>(queries_here * keys_here);
  sums.query_step = run.broadcast(2) ? 0 : 1;
  sums.key_step = run.broadcast(3) ? 0 : static_cast<std::int64_t>(queries_here);
  std::fill_n(sums.data, queries_here * keys_here, 0.0);

  const IndexRange batches = run.range(0, part[0], 1, job.g.batch), heads = run.range(1, part[1], 1, job.g.heads);
  for (std::int64_t b = batches.begin; b < batches.end; ++b) {
    const SequenceSpan sequence = job.sequence(b);
    const IndexRange queries = run.range(2, part[2], kChunkRows, sequence.n_q);
    const IndexRange keys = run.range(3, part[3], job.block_keys, sequence.n_k);
    for (std::int64_t head = heads.begin; head < heads.end; ++head) {
      for (std::int64_t first = queries.begin; first < queries.end; first += kChunkRows) {
        const IndexRange chunk{first, std::min(first + kChunkRows, queries.end)};
        add_bias_chunk(run.backward, sequence, head, chunk, keys, s, sums);
      }
    }
  }

  const std::int64_t query = part[2] * kChunkRows, key = part[3] * job.block_keys;
  const TensorView& d_bias = run.d_bias;
  for (std::int64_t i = query; i < std::min(query + kChunkRows, d_bias.extent(2)); ++i) {
    const std::int64_t row = part[0] * d_bias.step(0) + part[1] * d_bias.step(1) + i * d_bias.step(2);
    for (std::int64_t j = key; j < std::min(key + job.block_keys, d_bias.extent(3)); ++j) {
      core::store_element(d_bias.data, d_bias.dtype, row + j, sums.at(j - key, i - query));
    }
  }
}

}  // namespace dspattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dspattn::cpu {

HWY_EXPORT(bias_task);

void bias_gradient(const BackwardArgs& args) {
  const BiasJob run(args);
  const auto task = HWY_DYNAMIC_DISPATCH(bias_task);
  parallel_for(run.tasks(), args.run, [&](std::int64_t i) { task(run, i); });
}

}  // namespace dspattn::cpu
#endif  // HWY_ONCE
