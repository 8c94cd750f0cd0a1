// The checks of a problem: q, k, v, what is packed or paged, pattern, scale, masks and what else belongs to a call of
// either pass. Those of results and of how to run are in validate.cpp.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/tensor_checks.h"
#include "dspattn/attention.h"

namespace dspattn::core {

void check_problem(Report& report, const Problem& problem);
// Again of a problem that was checked, what may have changed since while its views have not: lengths that can be read.
void check_lengths(Report& report, const Problem& problem);

// Type and extents of sums of V (value_sums.h), for n_k keys.
void check_sums_shape(Report& report, std::string_view argument, const ConstTensorView& sums, std::int64_t batch,
                      std::int64_t kv_heads, std::int64_t n_k, std::int64_t d_v);

}  // namespace dspattn::core
