// The compiled kernels of the tf32 forward, by head dim.
#pragma once

#include "cuda/sm90/common/launch.h"

namespace dspattn::cuda::sm90::tf32 {

// Defined in instance.cu.in, compiled once per head dim.
template <int kDim>
Launcher launcher(Variant variant);

}  // namespace dspattn::cuda::sm90::tf32
