// A build without CUDA.
#include "cuda/pipeline/pipeline.h"
#include "dspattn/error.h"

namespace dspattn::cuda::pipeline {
namespace {

[[noreturn]] void refuse() { throw Error("device: expected cpu, got cuda; this build is without CUDA"); }

}  // namespace

void qk_prune(const QkPruneArgs&) { refuse(); }
void nonzero_softmax(const SoftmaxArgs&) { refuse(); }
void pv_sparse(const PvSparseArgs&) { refuse(); }
void run_pipeline(const ForwardArgs&, const BlockMaskView&) { refuse(); }
std::span<const core::KernelRow> pipeline_rows() { return {}; }

}  // namespace dspattn::cuda::pipeline
