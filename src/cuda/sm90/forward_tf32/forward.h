// Host side of the tf32 forward: which problems it serves, plan, launch.
#pragma once

#include <string>

#include "cuda/sm90/common/forward.h"

namespace dspattn::cuda::sm90::tf32 {

void why_not(const FusedRow& row, const Problem& problem, core::Refusals& refusals);

// The plan in words; empty where there is nothing to compute.
std::string describe_plan(int dim, const Problem& problem);

// Enqueues on the caller's stream; nothing is allocated or waited for. Launchers as for the 16-bit forward.
void forward_launch(int dim, Launcher (*launcher)(Variant), Launcher (*general_launcher)(Variant),
                    const ForwardArgs& args);

}  // namespace dspattn::cuda::sm90::tf32
