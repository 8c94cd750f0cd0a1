// Brings sums of V up to date that the caller keeps (dspattn/value_sums.h).
#pragma once

#include <cuda_runtime.h>

#include "cuda/blocks/value_sums_params.h"

namespace dspattn::cuda::blocks {

void launch_value_sums(const ValueSumsParams& params, int sequences, cudaStream_t stream);

}  // namespace dspattn::cuda::blocks
