// Host side of the general backward: which problems it serves, its workspace, and parameters from problem and plan.
#pragma once

#include <cstddef>
#include <string>

#include "core/kernel_row.h"

namespace dspattn::cuda::general::backward {

// Beyond what the general forward refuses.
void size_why_not(const Problem& problem, core::Refusals& refusals);
std::string describe_plan(const Problem& problem);
std::size_t workspace_bytes(const BackwardArgs& args);

// Enqueues on the caller's stream; nothing is allocated or waited for.
void backward_launch(const BackwardArgs& args);

}  // namespace dspattn::cuda::general::backward
