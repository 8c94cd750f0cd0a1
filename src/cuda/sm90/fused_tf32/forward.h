// Host side of the fused tf32 forward: which problems it serves, and its launch.
#pragma once

#include "cuda/sm90/fused/forward.h"

namespace dspattn::cuda::sm90::tf32 {

core::Reasons why_not(const FusedRow& row, const Problem& problem);

// Enqueues on the caller's stream; nothing is allocated or waited for.
void forward_launch(const FusedRow& row, const ForwardArgs& args);

}  // namespace dspattn::cuda::sm90::tf32
