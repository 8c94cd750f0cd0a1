// Host side of the fused tf32 forward: which problems it serves, and its launch.
#pragma once

#include "cuda/sm90/fused/forward.h"

namespace dspattn::cuda::sm90::tf32 {

void why_not(const FusedRow& row, const Problem& problem, core::Refusals& refusals);

// Enqueues on the caller's stream; nothing is allocated or waited for.
void forward_launch(const FusedRow& row, const ForwardArgs& args);

}  // namespace dspattn::cuda::sm90::tf32
