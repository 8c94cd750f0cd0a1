// choice = shared on a tile, whose rows hold the heads of a position side by side: the sums that are compared.
#if defined(DSPATTN_CPU_SHARED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSPATTN_CPU_SHARED_INL_H_
#undef DSPATTN_CPU_SHARED_INL_H_
#else
#define DSPATTN_CPU_SHARED_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <limits>

#include "cpu/job.h"
#include "cpu/load-inl.h"
#include "cpu/select-inl.h"
#include "cpu/shared.h"
#include "cpu/softmax-inl.h"
#include "cpu/tile.h"

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {

// RowTotals of the rows of a tile.
struct alignas(64) TileTotals {
  float largest[kTileQ];
  float factor[kTileQ];

  TileTotals(const RowTotals& totals, const SequenceSpan& sequence, const TileRows& tile) {
    for (int r = 0; r < kTileQ; ++r) {
      const std::size_t index = totals.index(sequence, tile.head[r], tile.position[r]);
      largest[r] = totals.largest(index);
      factor[r] = totals.factor(index);
    }
  }
};

// sums[key][row] for the keys of the groups of `args`: the weights of the key in all heads of the row's position; -inf
// where none of them that has weights sees it. Heads are added in order, so that a row's sums do not depend on its
// tile.
inline void sum_weights(const TileTotals& totals, float scale_log2, int group_heads, int rows, const SelectArgs& args,
                        ScoreTile& sums) {
  const Exp2 exp2(scale_log2);
  const auto sum_key = [&](int key) HWY_ATTR {
    const float* scores = args.scores->value[key];
    float* of_key = sums.value[key];
    for (int v = 0; v < kVecsQ; ++v) {
      const int row = v * kLanes;
      const VecF score = hn::Load(kF32, scores + row);
      const VecF factor = hn::Load(kF32, totals.factor + row);
      const VecF weight = hn::Mul(exp2(hn::Sub(score, hn::Load(kF32, totals.largest + row))), factor);
      const auto counts = hn::And(hn::Gt(factor, hn::Zero(kF32)), hn::Gt(score, minus_infinity()));
      hn::Store(hn::IfThenElseZero(counts, weight), kF32, of_key + row);
    }
    for (int first = 0; first < rows; first += group_heads) {
      float sum = 0;
      bool seen = false;
      for (int r = first; r < first + group_heads; ++r) {
        sum += of_key[r];
        seen = seen || (totals.factor[r] > 0.0f && scores[r] > -std::numeric_limits<float>::infinity());
      }
      std::fill_n(of_key + first, group_heads, seen ? sum : -std::numeric_limits<float>::infinity());
    }
  };
  for (int g = args.begin; g < args.end; ++g) {
    for (int e = 0; e < args.group; ++e) sum_key(g * args.group_step + e * args.element_step);
  }
}

}  // namespace dspattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
