// validate -> run on the tensors' device.
#include "dspattn/pipeline.h"

#include "core/pipeline_check.h"
#include "core/validate.h"
#include "cpu/pipeline.h"
#include "cuda/pipeline/pipeline.h"

namespace dspattn {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t rounded(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void check_forward(const ForwardArgs& args, const BlockMaskView& blocks) {
  core::raise_if_any(core::forward_reasons(args));
  core::raise_if_any(core::pipeline_reasons(args.problem, blocks));
}

// The chain on the CPU, where nothing is left out.
void chain_on_cpu(const ForwardArgs& args, const BlockMaskView& blocks) {
  const Problem& problem = args.problem;
  SparseMatrices matrices{core::sparse_shape_of(problem, blocks), args.run.workspace, nullptr};
  matrices.metadata = static_cast<std::byte*>(args.run.workspace) + rounded(matrices.shape.nonzeros_bytes());
  QkPruneArgs prune;
  prune.q = problem.q;
  prune.k = problem.k;
  prune.mask = problem.mask;
  prune.scale = problem.scale;
  prune.blocks = blocks;
  prune.scores = matrices;
  prune.run.threads = args.run.threads;
  cpu::qk_prune(prune);
  SoftmaxArgs softmax;
  softmax.matrices = matrices;
  softmax.blocks = blocks;
  softmax.lse = args.lse;
  softmax.run.threads = args.run.threads;
  cpu::nonzero_softmax(softmax);
  PvSparseArgs product;
  product.weights = matrices;
  product.v = problem.v;
  product.blocks = blocks;
  product.key_lengths = problem.mask.key_lengths;
  product.out = args.out;
  product.run.threads = args.run.threads;
  cpu::pv_sparse(product);
}

}  // namespace

void qk_prune(const QkPruneArgs& args) {
  core::raise_if_any(core::qk_prune_reasons(args));
  args.device.type == DeviceType::cpu ? cpu::qk_prune(args) : cuda::pipeline::qk_prune(args);
}

void nonzero_softmax(const SoftmaxArgs& args) {
  core::raise_if_any(core::softmax_reasons(args));
  args.device.type == DeviceType::cpu ? cpu::nonzero_softmax(args) : cuda::pipeline::nonzero_softmax(args);
}

void pv_sparse(const PvSparseArgs& args) {
  core::raise_if_any(core::pv_sparse_reasons(args));
  args.device.type == DeviceType::cpu ? cpu::pv_sparse(args) : cuda::pipeline::pv_sparse(args);
}

std::size_t pipeline_workspace_bytes(const ForwardArgs& args, const BlockMaskView& blocks) {
  check_forward(args, blocks);
  const SparseShape shape = core::sparse_shape_of(args.problem, blocks);
  return rounded(shape.nonzeros_bytes()) + rounded(shape.metadata_bytes());
}

void pipeline_forward(const ForwardArgs& args, const BlockMaskView& blocks) {
  const std::size_t needed = pipeline_workspace_bytes(args, blocks);
  if (args.run.workspace_bytes < needed || (needed > 0 && args.run.workspace == nullptr)) {
    throw Error("workspace: expected at least " + std::to_string(needed) + " bytes, got " +
                (args.run.workspace == nullptr ? "null" : std::to_string(args.run.workspace_bytes) + " bytes"));
  }
  args.problem.device.type == DeviceType::cpu ? chain_on_cpu(args, blocks) : cuda::pipeline::run_pipeline(args, blocks);
}

}  // namespace dspattn
