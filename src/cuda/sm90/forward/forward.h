// Host side of the 16-bit forward: plan, parameters, launch.
#pragma once

#include <string>

#include "cuda/sm90/common/forward.h"
#include "cuda/sm90/forward/plan.h"

namespace dspattn::cuda::sm90 {

// Bytes for the order in which items are taken, where only the device knows it, and for means of V.
std::size_t fused_workspace(const ForwardArgs& args);

// The plan in words; empty where there is nothing to compute.
std::string describe_plan(const ForwardKernel& kernel, const Problem& problem);

// A kernel's variants with rest = mean, and those of the head dim that has the general one.
struct MeanLaunchers {
  Launcher (*launcher)(Variant) = nullptr;
  Launcher (*general_launcher)(Variant) = nullptr;
};

// Enqueues on the caller's stream; nothing is allocated or waited for. `launcher` gives the kernel's variants,
// `general_launcher` those of the head dim that has the general one.
void fused_forward_launch(const ForwardKernel& kernel, Launcher (*launcher)(Variant),
                          Launcher (*general_launcher)(Variant), const ForwardArgs& args,
                          const MeanLaunchers& mean = {});

}  // namespace dspattn::cuda::sm90
