// The pipeline on the GPU. Arguments are validated already. In a build without CUDA the functions throw and there are
// no rows.
#pragma once

#include <span>

#include "core/kernel_row.h"
#include "dspattn/pipeline.h"

namespace dspattn::cuda::pipeline {

void qk_prune(const QkPruneArgs& args);
void nonzero_softmax(const SoftmaxArgs& args);
void pv_sparse(const PvSparseArgs& args);

// The three chained: the sparse matrix lives in args.run.workspace, and blocks that are masked for all their queries
// are left out.
void run_pipeline(const ForwardArgs& args, const BlockMaskView& blocks);

// The chain's row of the kernel table.
std::span<const core::KernelRow> pipeline_rows();

}  // namespace dspattn::cuda::pipeline
