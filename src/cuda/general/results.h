// The end of a tile of rows: sinks, means of V, results to memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/add_means.h"
#include "cuda/blocks/sink.h"
#include "cuda/general/item.h"
#include "cuda/general/products.h"

namespace dspattn::cuda::general {

// A logit without a value in the softmax of one of a lane's two rows (kRow 0: row g, 1: row g + 8); its weight is added
// to the row's sum.
template <typename C, int kRow>
__device__ __forceinline__ void add_sink(const ScoreScales& scales, float sink, float& sum, float& minus,
                                         float (&out)[C::kOutColumns / 2]) {
  constexpr float kLog2E = 1.442695040888963f;
  const float logit = sink * kLog2E;  // base 2, as the reference below
  const float unit = C::kReferenceIsScore ? scales.exp2_scale : 1.0f;
  const bool empty = sum == 0;
  const float reference = -minus * unit;  // of scores near the largest fp32: infinite
  if (!empty && !(logit > reference)) {
    sum += ptx::exp2_fast(logit - reference);
    return;
  }
  // The sink is the reference now.
  const float shrink = empty ? 0.0f : ptx::exp2_fast(reference - logit);
  sum = sum * shrink + 1.0f;
  minus = -logit / unit;
#pragma unroll
  for (int i = 2 * kRow; i < C::kOutColumns / 2; i += 4) {
    out[i] = empty ? 0.0f : out[i] * shrink;  // whatever V holds
    out[i + 1] = empty ? 0.0f : out[i + 1] * shrink;
  }
}

// The mean of V that takes the weight of a row's pruned keys, at a lane's first column.
template <typename C>
__device__ __forceinline__ const float* mean_of_row(const ForwardParams& params, const RowsItem& item, int head,
                                                    int position, int lane) {
  const MeansView& means = params.extras.means;
  const tile::MeanTable::Sequence sequence{item.sequence, item.k_row, item.out_row - item.row_begin};
  const int entry = means.table.entry(sequence, item.band, position);
  const int index = means.heads_per_mean.quotient(head) * static_cast<int>(means.table.entries) + entry;
  return means.data + std::int64_t{ptx::opaque(index)} * C::kScoreDim + item.column + 2 * (lane & 3);
}

// The weights of a lane's two rows of pruned keys times means of V, added to the output. `row`: as below.
template <typename C>
__device__ __forceinline__ void add_rest(const ForwardParams& params, const FullItem& item, int row,
                                         const OwnRows& rows, RowBlock<C>& block) {
  const int lane = own_thread() & 31;
  __syncwarp();  // other lanes' sums
  add_means<C>({mean_of_row<C>(params, item, rows.head0, rows.position0, lane),
                mean_of_row<C>(params, item, rows.head1, rows.position1, lane)},
               {item.rest[row], item.rest[row + 8]}, block.out);
}

// Where rows of heads that choose together go.
__device__ __forceinline__ RowTargets targets_of(const ForwardParams& params, const RowsItem& item,
                                                 const OwnRows& rows) {
  const auto at = [&](const auto& view, int position, int head) {
    return (position - item.row_begin) * view.row_stride + (head - item.head) * view.head_stride;
  };
  return {item.out_offset + at(params.out, rows.position0, rows.head0),
          item.out_offset + at(params.out, rows.position1, rows.head1),
          item.lse_offset + at(params.lse, rows.position0, rows.head0),
          item.lse_offset + at(params.lse, rows.position1, rows.head1),
          rows.exists0,
          rows.exists1};
}

// What heads that choose together need to know of their rows (shared_choice.h).
template <typename C>
__device__ __forceinline__ void store_totals(const LseView& view, const RowTargets& to, int lane, const RowSums& sums,
                                             const RowState& state) {
  if ((lane & 3) != 0) return;
  const auto store = [&](bool stored, std::int64_t offset, float sum, float minus) {
    if (!stored) return;
    view.data[offset] = -minus;
    view.data[offset + 1] = C::kReferenceIsScore || sum == 0 ? ptx::log2_fast(sum) : ptx::log2_fast(sum) - minus;
  };
  store(to.stored0, to.lse0, sums.sum0, state.minus0);
  store(to.stored1, to.lse1, sums.sum1, state.minus1);
}

// 16 rows of a warp, of which `row` is a lane's first within the CTA's. kSharesOutput: `index` 0 are its own, and
// `column` is the first it has of the output.
template <typename C>
__device__ __forceinline__ void store_block(const ForwardParams& params, const ItemOf<C>& item, int row,
                                            RowBlock<C>& block, int index, int column) {
  const int lane = own_thread() & 31;
  const OwnRows rows = own_rows(item, row);
  RowSums sums = sum_up(block.state);
  if constexpr (C::kAll) {
    if (params.extras.means.data != nullptr) add_rest<C>(params, item, row, rows, block);
  }
  if (params.sinks != nullptr) {
    const float sink0 = params.sinks[rows.head0 * params.sink_stride];
    const float sink1 = params.sinks[rows.head1 * params.sink_stride];
    if (sink0 != -INFINITY) add_sink<C, 0>(params.scales, sink0, sums.sum0, block.state.minus0, block.out);
    if (sink1 != -INFINITY) add_sink<C, 1>(params.scales, sink1, sums.sum1, block.state.minus1, block.out);
  }
  OutView out = params.out;
  RowTargets to;
  if constexpr (C::kAll) {
    to = targets_of(params, item, rows);
    out.columns -= item.column;
  } else {
    to = blocks::targets_of(out, params.lse, item, row);
  }
  if constexpr (C::kSharesOutput) {
    to.out0 += column;
    to.out1 += column;
    out.columns -= column;
  }
  if constexpr (C::kAll) {
    if (out.data == nullptr) return store_totals<C>(params.lse, to, lane, sums, block.state);
  }
  if (C::kSharesOutput ? index == 0 : !C::kAll || item.column == 0)
    store_lse<C>(params.lse, params.scales, to, lane, sums, block.state);
  if constexpr (C::kAll) {
    // Dropout: what is left is divided by its share.
    sums = {sums.sum0 * params.extras.keep_probability, sums.sum1 * params.extras.keep_probability};
  }
  store_rows<OfWarp<C>>(out, params.vector_out, to, lane, block.out, sums);
}

}  // namespace dspattn::cuda::general
