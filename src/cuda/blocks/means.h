// What runs before a kernel with rest = mean: the means of V that tile/means.h speaks of, in a table.
//
// One kernel adds up V over every whole block of 128 keys, and over the first keys of sequences; a second one adds up
// blocks, and where windows are narrow single keys. Everything is added in a fixed order, in fp32, and nothing is ever
// subtracted: what a row does not see, be it NaN, reaches none of its numbers.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/blocks/means_params.h"

namespace dspattn::cuda::blocks {

// Rows of V that prefix_means.cu reads: of 16-bit elements, 16-byte aligned, in one piece.
bool has_plain_rows(const MeansParams& params);
// Of such rows, where query rows see all keys before their last and no mask tensor hides any: one kernel.
void launch_plain_prefix_means(const MeansParams& params, cudaStream_t stream);

// The kernel that follows may start before these have ended: it must wait for them before it reads the table.
void launch_means(const MeansParams& params, cudaStream_t stream);

// Before a kernel that writes the means itself: its counts begin with 0. It must wait for them before it touches them.
void launch_own_means(const OwnMeans& own, std::size_t count_bytes, cudaStream_t stream);

}  // namespace dspattn::cuda::blocks
