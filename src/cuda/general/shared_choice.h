// Heads that share a key head and choose their keys together: those of the largest sums of their weights before
// pruning, softmax over all visible keys. A kernel before has left every row's total.
//
// A CTA has all these heads of its positions, in neighbouring rows (tile/group_rows.h): sums go over the lanes of a
// column, and over both rows of a lane. Of more heads than a position has rows, every CTA goes through all parts, in
// their order, before it weighs its own: sums are the same bits everywhere.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/general/extras.h"
#include "cuda/general/item.h"
#include "cuda/general/params.h"
#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::general {

// What a row's weights add up to: a logarithm of base 2, relative to a reference, which is a score. Where scores are of
// the size of the largest numbers a log-sum-exp would have lost the sum, or be infinite. NaN: the row is.
struct RowTotal {
  float reference, log2;
};

// One row's share of a key, given its compared score: more than 0 where the head sees the key. A head that is NaN does
// not count.
template <typename C>
__device__ __forceinline__ float share_of(float score, float lowest, float scale, const RowTotal& total) {
  constexpr float kLeast = 0x1p-120f;
  if (!(score > lowest) || std::isnan(total.log2)) return 0;
  const float above = C::kIsFp32 ? score - total.reference : score;  // 16-bit: there is none
  return fmaxf(ptx::exp2_fast(fmaf(above, scale, -total.log2)), kLeast);
}

template <typename C>
__device__ __forceinline__ float score_at(const std::uint32_t (&words)[C::kTileK / 4], int i, int row) {
  float row0, row1;
  ptx::unpack_f16x2(words[i], row0, row1);
  return row == 0 ? row0 : row1;
}
template <typename C>
__device__ __forceinline__ float score_at(const float (&scores)[C::kTileK / 2], int i, int row) {
  const int at = place_register(i);
  return row == 0 ? scores[at] : scores[at + 2];
}

// Sums of shares over the heads of a position, for each of a lane's rows.
template <typename C, typename Scores>
struct Shares {
  const ForwardParams& params;
  const Scores& scores;
  RowTotal total0, total1;  // of the lane's rows

  __device__ __forceinline__ Shares(const ForwardParams& p, const RowsItem& item, const OwnRows& own, const Scores& s)
      : params(p), scores(s) {
    const LseView& view = params.extras.shared_totals;
    const int first_row = item.out_row - item.row_begin;
    const auto total_of = [&](bool exists, int head, int position) -> RowTotal {
      if (!exists || view.data == nullptr) return {0, NAN};
      const float* at = view.data + view.offset(item.batch, head, first_row + position);
      return {C::kIsFp32 ? at[0] : 0.0f, at[1]};
    };
    total0 = total_of(own.exists0, own.head0, own.position0);
    total1 = total_of(own.exists1, own.head1, own.position1);
  }

  __device__ __forceinline__ void add_up(int row, float (&sums)[C::kTileK / 4]) const {
    constexpr float kLowest = C::kIsFp32 ? -INFINITY : blocks::kLowestScore;
    const float scale = params.scales.exp2_scale;
    const int rows = 1 << params.group.rows_log2;
    const auto total = [&](bool first) -> RowTotal {  // member by member: chosen as a whole they would lie in memory
      return {first ? total0.reference : total1.reference, first ? total0.log2 : total1.log2};
    };
    const RowTotal own = total(row == 0), other = total(row != 0);
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) {
      sums[i] = share_of<C>(score_at<C>(scores, i, row), kLowest, scale, own);
      if (rows == tile::kMostGroupRows) {  // the lane's other row is at the same position
        sums[i] += share_of<C>(score_at<C>(scores, i, row ^ 1), kLowest, scale, other);
      }
    }
#pragma unroll 1
    for (int x = 1; x < rows && x < 8; x *= 2) {
#pragma unroll
      for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, 4 * x);
    }
  }
  __device__ __forceinline__ static void hide_unseen(float (&sums)[C::kTileK / 4]) {
#pragma unroll
    for (float& sum : sums) sum = sum == 0 ? -INFINITY : sum;  // no head sees the key
  }
  __device__ __forceinline__ void operator()(int row, float (&sums)[C::kTileK / 4]) const {
    add_up(row, sums);
    hide_unseen(sums);
  }

  // Heads in parts, one position a warp: sums over this part and those before, which wait in shared memory.
  __device__ __forceinline__ void add_part(FullItem& item, float (&sums)[C::kTileK / 4]) const {
    add_up(0, sums);
    const int lane = own_thread() & 31;
    float* so_far = item.shares[own_thread() >> 5] + (lane & 3) * (C::kTileK / 4);
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) {
      if (item.part > 0) sums[i] += so_far[i];
    }
    __syncwarp();  // all have read them
    if (lane < 4) {
#pragma unroll
      for (int i = 0; i < C::kTileK / 4; ++i) so_far[i] = sums[i];
    }
    __syncwarp();
    hide_unseen(sums);
  }

  // A row with a NaN keeps everything, and shows it.
  __device__ __forceinline__ std::uint32_t shown() const {
    return (std::isnan(total0.log2) ? 0xFFFFu : 0u) | (std::isnan(total1.log2) ? ~0xFFFFu : 0u);
  }
};

}  // namespace dspattn::cuda::general
