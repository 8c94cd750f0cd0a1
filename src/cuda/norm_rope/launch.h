#pragma once

#include <cuda_runtime.h>

#include "cuda/norm_rope/plan.h"

namespace dspattn::cuda::norm_rope_kernel {

void launch_norm_rope(const Plan& plan, cudaStream_t stream);

}  // namespace dspattn::cuda::norm_rope_kernel
