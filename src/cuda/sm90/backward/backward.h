// Host side of the fused backward: parameters, workspace, launch.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "core/kernel_row.h"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/plan.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::sm90::backward {

// What of a problem that fused_why_not() admits is too large here.
void size_why_not(const BackwardKernel& kernel, const Problem& problem, core::Refusals& refusals);

std::size_t fused_workspace(const BackwardKernel& kernel, const BackwardArgs& args);

// The plan in words.
std::string describe_plan(const BackwardKernel& kernel, const Problem& problem);

// Enqueues on the caller's stream; nothing is allocated or waited for.
void fused_backward_launch(const BackwardKernel& kernel,
                           void (*launch_instance)(const BackwardParams&, int ctas, cudaStream_t),
                           const BackwardArgs& args);

}  // namespace dspattn::cuda::sm90::backward
