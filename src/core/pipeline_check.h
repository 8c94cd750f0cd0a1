// Checks of the pipeline's functions: all reasons, none of which reads device memory.
#pragma once

#include <string>
#include <vector>

#include "dspattn/pipeline.h"

namespace dspattn::core {

std::vector<std::string> qk_prune_reasons(const QkPruneArgs& args);
std::vector<std::string> softmax_reasons(const SoftmaxArgs& args);
std::vector<std::string> pv_sparse_reasons(const PvSparseArgs& args);

// What the pipeline as a whole cannot do with a valid problem: packed batches, patterns that sparse tensor cores do not
// have, a block mask that does not fit.
std::vector<std::string> pipeline_reasons(const Problem& problem, const BlockMaskView& blocks);

// The sparse matrix of a problem.
SparseShape sparse_shape_of(const Problem& problem, const BlockMaskView& blocks);

}  // namespace dspattn::core
