// What runs before a kernel with rest = mean: the means of V that tile/means.h speaks of, in a table.
//
// One kernel adds up V over every whole block of 128 keys, and over the first keys of sequences; a second one adds up
// blocks. Rows with entries of their own have a kernel that adds up single keys. Everything is added in a fixed order,
// in fp32, and nothing is ever subtracted: what a row does not see, be it NaN, reaches none of its numbers.
#pragma once

#include <cuda_runtime.h>

#include "cuda/blocks/means_params.h"

namespace dspattn::cuda::blocks {

// Rows of V that prefix_means.cu reads: of 16-bit elements, 16-byte aligned, in one piece.
bool has_plain_rows(const MeansParams& params);
// Of such rows, where no mask tensor hides any. Query rows see all keys before their last: all of the table; under
// windows: means of first keys, and sums of blocks.
void launch_plain_prefix_means(const MeansParams& params, cudaStream_t stream);

// window_means.cu, where no mask tensor hides any key. All of the table for windows that may hold no whole block; for
// others what sums of blocks and means of first keys, which are there, leave to do.
void launch_row_means(const MeansParams& params, cudaStream_t stream);
void launch_window_means(const MeansParams& params, cudaStream_t stream);

// The kernel that follows may start before these have ended: it must wait for them before it reads the table.
void launch_means(const MeansParams& params, cudaStream_t stream);

}  // namespace dspattn::cuda::blocks
