// rest = mean: what the means of V are made of, for the fast CPU kernels.
//
// A row's pruned keys bring the mean of V over the whole blocks of 128 keys that it sees. The sums of such blocks are
// worked out once, before the rows; a row adds up those of its own blocks, in ascending order, so its mean has the same
// bits however the work is cut, and V of a key that it does not see has no part in it (differences of running sums
// would hand on a NaN). Rows that see no whole block add up their keys themselves, at most 254 of them.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/job.h"
#include "cpu/tile.h"

namespace dspattn::cpu {

using core::kMeanBlock;

// Sums of V over blocks of 128 keys and how many keys each is of: keys that a mask hides are left out.
class BlockSums {
 public:
  // Blocks of the sequences of a job, not yet filled. Masks that differ between the query heads of a key head have sums
  // for each of them.
  BlockSums(const Job& job, const PanelShape& shape);

  struct Entry {
    std::int64_t sequence = 0;
    std::int64_t head = 0;  // a query head, the first of those that share the sum
    std::int64_t block = 0;
  };
  std::int64_t entries() const { return static_cast<std::int64_t>(counts_.size()); }
  Entry entry(std::int64_t index) const;
  // Where the sum of a query head's block lies.
  std::int64_t index_of(const SequenceSpan& sequence, std::int64_t head, std::int64_t block) const {
    const SequenceBlocks& blocks = sequences_[static_cast<std::size_t>(sequence.index)];
    return blocks.first + head / heads_together_ * blocks.count + block;
  }

  float* sum(std::int64_t index) { return sums_.data() + index * padded_; }
  const float* sum(std::int64_t index) const { return sums_.data() + index * padded_; }
  std::int32_t& count(std::int64_t index) { return counts_[static_cast<std::size_t>(index)]; }
  std::int32_t count(std::int64_t index) const { return counts_[static_cast<std::size_t>(index)]; }

 private:
  struct SequenceBlocks {
    std::int64_t first = 0;  // entry of head 0, block 0
    std::int64_t count = 0;  // whole blocks of the sequence
  };
  std::vector<SequenceBlocks> sequences_;
  std::int64_t heads_together_ = 1;  // query heads that share their sums
  std::int64_t padded_ = 0;
  std::vector<float> sums_;
  std::vector<std::int32_t> counts_;
};

}  // namespace dspattn::cpu
