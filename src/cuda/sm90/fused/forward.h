// Host side of the fused forward: which problems it serves, and its launch.
#pragma once

#include "core/kernel_row.h"
#include "cuda/sm90/fused/launch.h"

namespace dspattn::cuda::sm90 {

// One row of the kernel table.
struct FusedRow {
  DType type;
  Pattern pattern;
  int dim;        // largest head dim it takes
  int dim_above;  // and those above this
  Launcher (*launcher)(Variant variant);
  Launcher (*general_launcher)(Variant variant);  // of the head dim that has the general variant
};

core::Reasons fused_why_not(const FusedRow& row, const Problem& problem);

// Enqueues on the caller's stream; nothing is allocated or waited for.
void fused_forward_launch(const FusedRow& row, const ForwardArgs& args);

}  // namespace dspattn::cuda::sm90
