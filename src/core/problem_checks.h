// The checks of a problem: q, k, v, what is packed or paged, pattern, scale, masks and what else belongs to a call of
// either pass. Those of results and of how to run are in validate.cpp.
#pragma once

#include "core/tensor_checks.h"
#include "dspattn/attention.h"

namespace dspattn::core {

void check_problem(Report& report, const Problem& problem);

}  // namespace dspattn::core
