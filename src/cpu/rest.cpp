#include "cpu/rest.h"

#include <algorithm>

namespace dspattn::cpu {

BlockSums::BlockSums(const Job& job, const PanelShape& shape) : padded_(shape.padded) {
  const bool alike = job.allowed.same_for_rows(job.group_heads) && job.bias.same_for_rows(job.group_heads);
  heads_together_ = alike ? job.group_heads : 1;
  std::int64_t first = 0;
  for (std::int64_t b = 0; b < job.g.batch; ++b) {
    const SequenceSpan sequence = job.sequence(b);
    const std::int64_t keys = sequence.n_q > 0 ? std::min(sequence.n_k, sequence.key_length) : 0;
    sequences_.push_back({first, keys / kMeanBlock});
    first += job.g.heads / heads_together_ * sequences_.back().count;
  }
  sums_.assign(static_cast<std::size_t>(first * padded_), 0.0f);
  counts_.assign(static_cast<std::size_t>(first), 0);
}

BlockSums::Entry BlockSums::entry(std::int64_t index) const {
  // The last sequence that begins at or before it: empty ones begin where the next does.
  const auto after = std::upper_bound(sequences_.begin(), sequences_.end(), index,
                                      [](std::int64_t i, const SequenceBlocks& blocks) { return i < blocks.first; });
  const SequenceBlocks& blocks = *(after - 1);
  const std::int64_t within = index - blocks.first;
  return {after - 1 - sequences_.begin(), within / blocks.count * heads_together_, within % blocks.count};
}

}  // namespace dspattn::cpu
