// The small kernels of the general backward, before and after the two large ones.
#pragma once

#include <cuda_runtime.h>

#include "cuda/general/backward/params.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::general::backward {

// Zeros for all rows of gradients.
struct ClearedRows {
  OutView view;
  int element_bytes = 4;
  std::int64_t batch = 0, rows = 0;
  int heads = 0;
};
void launch_clear(const ClearedRows& rows, cudaStream_t stream);
void launch_clear_sinks(float* d_sinks, std::int64_t stride, unsigned heads, cudaStream_t stream);

// Copies of Q, dO, K and V, and the rows' numbers.
void launch_prepare(const BackwardParams& params, DType type, cudaStream_t stream);

void launch_sink_gradients(const BackwardParams& params, cudaStream_t stream);

// dQ from the sums that the key-stationary kernel has added up.
void launch_finish_queries(const BackwardParams& params, DType type, cudaStream_t stream);

// The gradient of a bias from parts. Where there are none (`zeros`: nothing to sum) it is 0.
void launch_sum_bias(const BackwardParams& params, DType type, bool zeros, cudaStream_t stream);

}  // namespace dspattn::cuda::general::backward
