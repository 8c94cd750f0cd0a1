// What runs before and after the fused backward: over query rows, and over rows that no sequence has.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/sm90/backward/params.h"

namespace dspattn::cuda::sm90::backward {

// Writes the workspace: query tiles of Q times 2^-e and of dO as the kernel loads them, every row's log-sum-exp and
// D = sum(dO * O) - dLSE, counters of 0. And gradients of 0 for rows of a packed batch.
void launch_prepare_rows(const BackwardParams& params, cudaStream_t stream);

// Gradients of 0 for all keys, where there is no query.
void launch_clear_keys(const OutView& d_k, const OutView& d_v, std::int64_t batch, int kv_heads, int keys,
                       cudaStream_t stream);

// The counters of the workspace, `bytes` of them, begin with 0.
void launch_clear_counters(void* counters, std::size_t bytes, cudaStream_t stream);

// dQ from its sums.
void launch_finish_d_q(const BackwardParams& params, cudaStream_t stream);

}  // namespace dspattn::cuda::sm90::backward
