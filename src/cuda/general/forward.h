// Host side of the general forward: which problems it serves, and parameters from problem and plan.
#pragma once

#include <cstddef>
#include <string>

#include "core/kernel_row.h"

namespace dspattn::cuda::general {

void why_not(DType type, const Problem& problem, core::Refusals& refusals);
std::string describe_plan(const Problem& problem);
std::size_t forward_workspace(const ForwardArgs& args);
void forward_launch(const ForwardArgs& args);

}  // namespace dspattn::cuda::general
