// The pipeline's functions behind the C interface of shim.h.
#include "bench/common/shim.h"
#include "dspattn/pipeline.h"

namespace {

using namespace dspattn;
using bench::args_of;
using bench::Call;
using bench::reported;
using bench::view;

BlockMaskView blocks_of(const Call& call) {
  BlockMaskView blocks;
  if (call.block == 0) return blocks;
  blocks.block = call.block;
  blocks.counts = view<const void*>(call.counts);
  blocks.columns = view<const void*>(call.columns);
  return blocks;
}

SparseMatrices matrices_of(const Call& call) {
  const Problem problem = args_of(call).problem;
  SparseMatrices matrices;
  matrices.shape.dtype = problem.q.dtype;
  matrices.shape.pattern = problem.pattern;
  matrices.shape.grouping = problem.grouping;
  matrices.shape.batch = problem.q.extent(0);
  matrices.shape.heads = problem.q.extent(1);
  matrices.shape.n_q = problem.q.extent(2);
  matrices.shape.n_k = problem.k.extent(2);
  matrices.shape.block = call.block;
  matrices.shape.width = call.block == 0 ? 0 : call.columns.shape[1];
  matrices.nonzeros = call.nonzeros;
  matrices.metadata = call.metadata;
  return matrices;
}

// None of the three needs a workspace.
Execution stage_run(const Call& call) {
  Execution run;
  run.stream = call.stream;
  return run;
}

}  // namespace

extern "C" {

int dspattn_bench_sparse_bytes(const Call* call, std::int64_t* nonzeros, std::int64_t* metadata, char* error,
                               int error_size) {
  return reported(error, error_size, [&] {
    const SparseShape shape = matrices_of(*call).shape;
    *nonzeros = static_cast<std::int64_t>(shape.nonzeros_bytes());
    *metadata = static_cast<std::int64_t>(shape.metadata_bytes());
  });
}

int dspattn_bench_qk_prune(const Call* call, char* error, int error_size) {
  return reported(error, error_size, [&] {
    const Problem problem = args_of(*call).problem;
    qk_prune({.device = problem.device,
              .q = problem.q,
              .k = problem.k,
              .mask = problem.mask,
              .scale = problem.scale,
              .blocks = blocks_of(*call),
              .scores = matrices_of(*call),
              .run = stage_run(*call)});
  });
}

int dspattn_bench_softmax(const Call* call, char* error, int error_size) {
  return reported(error, error_size, [&] {
    const ForwardArgs args = args_of(*call);
    nonzero_softmax({.device = args.problem.device,
                     .matrices = matrices_of(*call),
                     .blocks = blocks_of(*call),
                     .lse = args.lse,
                     .run = stage_run(*call)});
  });
}

int dspattn_bench_pv_sparse(const Call* call, char* error, int error_size) {
  return reported(error, error_size, [&] {
    const ForwardArgs args = args_of(*call);
    pv_sparse({.device = args.problem.device,
               .weights = matrices_of(*call),
               .v = args.problem.v,
               .blocks = blocks_of(*call),
               .out = args.out,
               .run = stage_run(*call)});
  });
}

int dspattn_bench_pipeline(const Call* call, char* error, int error_size) {
  return reported(error, error_size, [&] { pipeline_forward(args_of(*call), blocks_of(*call)); });
}
}
