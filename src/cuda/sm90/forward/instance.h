// The compiled kernels of the 16-bit forward, by what they were compiled for.
#pragma once

#include "cuda/sm90/common/launch.h"
#include "cuda/sm90/forward/config.h"

namespace dspattn::cuda::sm90 {

// Defined in instance.cu.in, compiled once per (type, selection, head dim).
template <DType kType, Selection kSelection, int kDim>
Launcher launcher(Variant variant);

// With rest = mean: defined in instance_mean.cu.in, compiled for every kDim that is a mean_dim().
template <DType kType, Selection kSelection, int kDim>
Launcher mean_launcher(Variant variant);

}  // namespace dspattn::cuda::sm90
