// The selection that a kernel made, found without any debug output: with V replaced by unit vectors the output holds
// the weights themselves, and a kept key has a weight above zero.
#pragma once

#include <string>
#include <vector>

#include "check/case_data.h"
#include "check/runner.h"
#include "cpu/reference.h"

namespace dspattn::check {

// One unit vector per key: `width` keys (1 ... 256) are probed by each call of the runner. With rest = mean every key
// of a row has a share in its output, so the same kernel is probed with rest = drop: the choice is a function of q, k
// and the masks alone, and a kernel that chose otherwise for the mean gives outputs that are not those of this
// selection.
cpu::Selection probe_selection(const CaseData& data, const Runner& runner, std::int64_t width,
                               std::int64_t key_columns);

struct SelectionJudgement {
  cpu::Selection selection;           // the kernel's; where a weight is too small to be seen, the oracle's
  std::int64_t near_ties = 0;         // groups in which kernel and oracle differ within rounding
  std::vector<std::string> failures;  // differences that are no near-ties, and keys that the mask forbids
};

// `oracle` is the contract's own selection. With exact sums every difference is a failure.
SelectionJudgement judge_selection(const CaseData& data, const cpu::Reference& oracle, const cpu::Selection& probed);

}  // namespace dspattn::check
