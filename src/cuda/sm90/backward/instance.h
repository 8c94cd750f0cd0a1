// The compiled kernels of the fused backward, by what they were compiled for.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/backward/config.h"
#include "cuda/sm90/backward/params.h"

namespace dspattn::cuda::sm90::backward {

// Defined in instance.cu.in, compiled once per (type, selection, head dim).
template <DType kType, Selection kSelection, int kDim>
void launch_instance(const BackwardParams& params, int ctas, cudaStream_t stream);

// In instance_bias.cu.in, where has_bias_kernel(): of problems whose bias is copied.
template <DType kType, Selection kSelection, int kDim>
void launch_bias_instance(const BackwardParams& params, int ctas, cudaStream_t stream);

}  // namespace dspattn::cuda::sm90::backward
