// How far a kernel's results may lie from the oracle's, given the same selection.
//
// 16-bit types: twice the error of the plain computation in that type (scores, weights, dP and dS each rounded to it,
// as an unfused implementation stores them), plus one unit in the last place of the largest result. The plain error is
// the largest of all elements, or twice its expected size where that is more: in a small problem it can be lucky. What
// the rounding of large scores is expected to do is counted for each element by itself.
// With rest = mean the plain computation has a weight for every visible key and the mean of V in the type.
// Backward is handed an output rounded to the type; what that alone may do to a gradient is allowed besides.
// fp32: a bound for each element, from the lengths of its sums and the magnitudes of their terms (check/rounding.h).
#pragma once

#include <vector>

#include "check/case_data.h"
#include "cpu/reference.h"

namespace dspattn::check {

struct ForwardTolerance {
  std::vector<double> out;  // as Reference::out
  std::vector<double> lse;
};

struct BackwardTolerance {
  std::vector<double> d_q, d_k, d_v, d_bias, d_sinks;  // as Gradients
};

// `given` is the oracle's result with the kernel's selection.
ForwardTolerance forward_tolerance(const CaseData& data, const cpu::Reference& given);
BackwardTolerance backward_tolerance(const CaseData& data, const cpu::Reference& given, const cpu::Gradients& gradients,
                                     const ForwardTolerance& forward);

}  // namespace dspattn::check
