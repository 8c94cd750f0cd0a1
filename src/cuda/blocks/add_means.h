// The end of an item with rest = mean: the weight of the rows' pruned keys times a mean of V joins the output.
#pragma once

#include <cstdint>

#include "cuda/blocks/item.h"
#include "cuda/blocks/means_params.h"
#include "cuda/blocks/rest16.h"
#include "cuda/blocks/sink.h"
#include "cuda/blocks/work.h"
#include "cuda/blocks/work_params.h"
#include "cuda/ptx/barrier.h"
#include "cuda/tile/means.h"

namespace dspattn::cuda::blocks {

// The weights of pruned keys of a thread's two rows, over all their lanes.
template <typename C>
__device__ __forceinline__ RowSums sum_up(const RestState<C, true>& rest, const RowState& state) {
  RowState sums = empty_rows();
  rest.get(state, sums.sum0, sums.sum1);
  return sum_up(sums);
}

// Where the means of a thread's two rows stand, at its first column (2 * (lane % 4)).
struct RowMeans {
  const float* row0;
  const float* row1;
};

// An entry of a head, at a lane's first column. Opaque: the compiler would pull the address to pieces.
template <typename C>
__device__ __forceinline__ const float* entry_at(const MeansView& means, int head, int entry, int lane) {
  const int index = means.heads_per_mean.quotient(head) * static_cast<int>(means.table.entries) + entry;
  return means.data + std::int64_t{ptx::opaque(index)} * C::kHeadDim + 2 * (lane & 3);
}

// `row` is row g of the thread's warp within the item; row g + 8 is the other. Rows past the sequence's end take the
// last one's: they are not stored.
template <typename C>
__device__ __forceinline__ RowMeans row_means(const MeansView& means, const WorkParams& work,
                                              const Item<C::kConsumers>& item, int row, int lane) {
  const tile::RowBand band{work.left, work.right, item.diagonal, item.key_length};
  const tile::MeanTable::Sequence sequence{item.sequence, item.k_row, item.out_row - item.row_begin};
  const auto at = [&](int own_row) {
    const int in_sequence = min(item.row_begin + own_row, item.rows - 1);
    return entry_at<C>(means, item.head, means.table.entry(sequence, band, in_sequence), lane);
  };
  return {at(row), at(row + 8)};
}

// The same from the item's description, where that has them.
template <typename C>
__device__ __forceinline__ RowMeans described_means(const MeansView& means, const Item<C::kConsumers>& item, int row,
                                                    int lane) {
  constexpr bool kLong = C::kTileQ > tile::kBlockKeys;
  const float* data = means.data + 2 * (lane & 3);
  return {data + std::int64_t{item.means.template entry<kLong>(row)} * C::kHeadDim,
          data + std::int64_t{item.means.template entry<kLong>(row + 8)} * C::kHeadDim};
}

// By the thread that describes an item, for the consumers.
template <typename C>
__device__ __forceinline__ void describe_means(const MeansView& means, const Work& work, Item<C::kConsumers>& item) {
  const int last = min(work.row_begin + C::kTileQ, work.rows) - 1;
  item.means = tile::tile_entries(means.table, {work.sequence, work.k_row, 0}, work.band, work.row_begin, last,
                                  means.heads_per_mean.quotient(work.head) * static_cast<int>(means.table.entries));
}

// Before the rows are normalised. The table is written by a kernel that may still run.
template <typename C>
__device__ __forceinline__ void add_means(const RowMeans& means, const RowSums& rest, float (&out)[C::kHeadDim / 2]) {
#pragma unroll
  for (int block = 0; block < C::kHeadDim / 8; ++block) {
    const float2 x = *reinterpret_cast<const float2*>(means.row0 + 8 * block);
    const float2 y = *reinterpret_cast<const float2*>(means.row1 + 8 * block);
    float* o = out + 4 * block;
    o[0] = fmaf(rest.sum0, x.x, o[0]);
    o[1] = fmaf(rest.sum0, x.y, o[1]);
    o[2] = fmaf(rest.sum1, y.x, o[2]);
    o[3] = fmaf(rest.sum1, y.y, o[3]);
  }
}

}  // namespace dspattn::cuda::blocks
