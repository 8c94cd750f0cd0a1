// rest = mean on a tile: the exponentials of the pruned keys, and the means of V that they bring.
#if defined(DSPATTN_CPU_REST_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSPATTN_CPU_REST_INL_H_
#undef DSPATTN_CPU_REST_INL_H_
#else
#define DSPATTN_CPU_REST_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <limits>

#include "cpu/job.h"
#include "cpu/load-inl.h"
#include "cpu/prune-inl.h"
#include "cpu/rest.h"
#include "cpu/select-inl.h"
#include "cpu/softmax-inl.h"
#include "cpu/tile.h"

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {

// Leaves of the scores those of pruned keys, all others -inf, and lets the largest of them count in slots.row_max: a
// choice by 16-bit keys may keep the smaller of two scores. `width` is that of the panels that the slots index.
inline void strike_kept(const KeySpan& span, int width, Slots& slots, ScoreTile& scores) {
  for (int v = 0; v < kVecsQ; ++v) {
    VecF largest = hn::Load(kF32, slots.row_max + v * kLanes);
    for (int key = span.first; key < span.last; ++key) {
      largest = hn::Max(largest, hn::Load(kF32, &scores.value[key][v * kLanes]));
    }
    hn::Store(largest, kF32, slots.row_max + v * kLanes);
  }
  for (int s = 0; s < slots.count; ++s) {
    for (int r = 0; r < kTileQ; ++r) {
      scores.value[slots.offset[s][r] / width][r] = -std::numeric_limits<float>::infinity();
    }
  }
}

// rest[row] = rest[row] * rescale[row] + the exponentials that strike_kept left, relative to `largest`.
inline void add_rest(const KeySpan& span, const ScoreTile& scores, float scale_log2, const float* largest,
                     const float* rescale, float* rest) {
  const Exp2 exp2(scale_log2);
  for (int v = 0; v < kVecsQ; ++v) {
    const int row = v * kLanes;
    const VecF most = hn::Load(kF32, largest + row);
    const VecF origin = hn::IfThenElse(hn::Eq(most, minus_infinity()), hn::Zero(kF32), most);
    VecF sum = hn::Mul(hn::Load(kF32, rest + row), hn::Load(kF32, rescale + row));
    for (int key = span.first; key < span.last; ++key) {
      const VecF score = hn::Load(kF32, &scores.value[key][row]);
      sum = hn::Add(sum, hn::IfThenZeroElse(hn::Eq(score, minus_infinity()), exp2(hn::Sub(score, origin))));
    }
    hn::Store(sum, kF32, rest + row);
  }
}

// Whether a mask tensor, of one query row, hides a key from the query head.
inline bool hidden(const Job& job, const SequenceSpan& sequence, std::int64_t head, std::int64_t key) {
  const auto address = [&](const MaskTensor& tensor) {
    return tensor.data + sequence.index * tensor.stride[0] + head * tensor.stride[1] + key * tensor.stride[3];
  };
  if (job.allowed.present() && *address(job.allowed) == 0) return true;
  return job.bias.present() && widen_one(address(job.bias), job.bias.dtype) == -std::numeric_limits<float>::infinity();
}

// sum[x] += shrink * V of the keys [begin, end) that no mask hides; how many they are. `row` is a buffer as long as
// `sum`.
inline std::int32_t add_values(const Job& job, const SequenceSpan& sequence, std::int64_t head, std::int64_t begin,
                               std::int64_t end, const PanelShape& shape, float shrink, float* HWY_RESTRICT row,
                               float* HWY_RESTRICT sum) {
  const VecF factor = hn::Set(kF32, shrink);
  std::int32_t count = 0;
  for (std::int64_t key = begin; key < end; ++key) {
    if (hidden(job, sequence, head, key)) continue;
    widen_row(job.v.at(sequence.batch, head / job.group_heads, sequence.k_begin + key), job.v.dtype, shape.columns,
              row);
    for (int x = 0; x < shape.padded; x += kLanes) {
      hn::StoreU(hn::MulAdd(factor, hn::Load(kF32, row + x), hn::LoadU(kF32, sum + x)), kF32, sum + x);
    }
    ++count;
  }
  return count;
}

// Fills one of the sums. `row` is a buffer of shape.padded floats.
inline void fill_block_sum(const Job& job, std::int64_t index, const PanelShape& shape, float* HWY_RESTRICT row,
                           BlockSums& sums) {
  const BlockSums::Entry entry = sums.entry(index);
  sums.count(index) = add_values(job, job.sequence(entry.sequence), entry.head, entry.block * kMeanBlock,
                                 (entry.block + 1) * kMeanBlock, shape, 1.0f, row, sums.sum(index));
}

// shrink * the mean of V for a row of `head` that sees the keys [begin, end), some of them not hidden. Sums that were
// worked out before are not of shrunken values: those of the blocks are then made again.
inline void mean_of_values(const Job& job, const SequenceSpan& sequence, const BlockSums& sums, std::int64_t head,
                           std::int64_t begin, std::int64_t end, const PanelShape& shape, float shrink,
                           float* HWY_RESTRICT row, float* HWY_RESTRICT mean) {
  std::fill_n(mean, shape.padded, 0.0f);
  std::int64_t count = 0;
  for (std::int64_t block = (begin + kMeanBlock - 1) / kMeanBlock; (block + 1) * kMeanBlock <= end; ++block) {
    const std::int64_t index = sums.index_of(sequence, head, block);
    if (sums.count(index) == 0) continue;
    count += sums.count(index);
    if (shrink != 1.0f) {
      add_values(job, sequence, head, block * kMeanBlock, (block + 1) * kMeanBlock, shape, shrink, row, mean);
      continue;
    }
    for (int x = 0; x < shape.padded; x += kLanes) {
      hn::Store(hn::Add(hn::Load(kF32, mean + x), hn::LoadU(kF32, sums.sum(index) + x)), kF32, mean + x);
    }
  }
  if (count == 0) count = add_values(job, sequence, head, begin, end, shape, shrink, row, mean);
  const VecF each = hn::Set(kF32, 1.0f / static_cast<float>(count));
  for (int x = 0; x < shape.padded; x += kLanes) hn::Store(hn::Mul(hn::Load(kF32, mean + x), each), kF32, mean + x);
}

}  // namespace dspattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
