// The compiled split-key kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode/params.h"

namespace dspattn::cuda::decode {

// For head dims of up to `dim`, which is one of the type's in tile/head_dims.h.
void launch_bf16(int dim, const Params& params, std::int64_t ctas, cudaStream_t stream);
void launch_f16(int dim, const Params& params, std::int64_t ctas, cudaStream_t stream);
void launch_f32(int dim, const Params& params, std::int64_t ctas, cudaStream_t stream);

// Joins the partial results; params as the kernel's.
void launch_merge(const Params& params, DType type, std::int64_t units, cudaStream_t stream);

// Clusters of `ctas`, of CTAs that fill a multiprocessor each, that the current device has room for.
int room_for_clusters(int ctas);

}  // namespace dspattn::cuda::decode
