// What runs before a kernel whose sequences only the device knows: the order of their items, and the rows of a packed
// output that no sequence has.
#pragma once

#include <cuda_runtime.h>

#include "cuda/blocks/prepare_params.h"

namespace dspattn::cuda::blocks {

// Nothing to do where there is neither a table nor a packed batch.
void launch_prepare(const PrepareParams& params, cudaStream_t stream);

}  // namespace dspattn::cuda::blocks
