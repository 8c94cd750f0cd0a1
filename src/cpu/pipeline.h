// The three functions of the pipeline on the CPU: plain loops over blocks of rows and keys, in threads. They write the
// same bytes as the GPU's: nonzeros row-major, metadata in the device's encoding. Arguments are validated already.
#pragma once

#include "dspattn/pipeline.h"

namespace dspattn::cpu {

void qk_prune(const QkPruneArgs& args);
void nonzero_softmax(const SoftmaxArgs& args);
void pv_sparse(const PvSparseArgs& args);

}  // namespace dspattn::cpu
