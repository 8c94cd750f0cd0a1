// choice = shared: the query heads of a key head keep the same keys, those of the largest sums of their weights before
// pruning. Weights need a row's whole sum of exponentials, so the fast kernels go over the keys twice: once for the
// sums, once for everything else.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/job.h"

namespace dspattn::cpu {

// What makes a row's scores its weights before pruning: exp(score - largest) * factor. Rows as those of the lse tensor.
class RowTotals {
 public:
  explicit RowTotals(const Problem& problem)
      : heads_(problem.q.extent(1)),
        rows_(problem.q.extent(2)),
        largest_(static_cast<std::size_t>(problem.q.extent(0) * heads_ * rows_), 0.0f),
        factor_(largest_.size(), 0.0f) {}

  std::size_t index(const SequenceSpan& sequence, std::int64_t head, std::int64_t position) const {
    return static_cast<std::size_t>((sequence.batch * heads_ + head) * rows_ + sequence.q_begin + position);
  }
  float& largest(std::size_t index) { return largest_[index]; }  // NaN: the row's weights are undefined
  float largest(std::size_t index) const { return largest_[index]; }
  float& factor(std::size_t index) { return factor_[index]; }  // 0: the row has no weights
  float factor(std::size_t index) const { return factor_[index]; }

 private:
  std::int64_t heads_, rows_;
  std::vector<float> largest_, factor_;
};

}  // namespace dspattn::cpu
