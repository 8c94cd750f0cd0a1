// The compiled kernels of the fused tf32 forward, by what they were compiled for.
#pragma once

#include "cuda/sm90/fused/launch.h"

namespace dspattn::cuda::sm90::tf32 {

// Three warpgroups' accumulators and Q fit up to this head dim; below it they were not tried.
constexpr bool has_wide(int dim) { return dim == 64; }
// The general variant is compiled for every other head dim only; smaller ones are filled up with zeros.
constexpr int general_dim(int dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// Defined in instance.cu.in, compiled once per head dim.
template <int kDim>
Launcher launcher(Variant variant);

}  // namespace dspattn::cuda::sm90::tf32
