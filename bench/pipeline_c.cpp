// The pipeline behind a C interface, for bench/pipeline.py and the tests that compare with PyTorch: tensors are plain
// pointers to contiguous [batch, heads, n, d] memory. Every function returns null, or what went wrong.
#include <cstdint>
#include <exception>
#include <string>

#include "dspattn/pipeline.h"

namespace {

using namespace dspattn;

// Mirrored field by field in bench/pipeline.py.
struct Call {
  std::int64_t device;  // -1: the CPU
  std::int64_t dtype;   // 0 fp32, 1 fp16, 2 bf16
  std::int64_t keep, group, interleaved, causal;
  std::int64_t batch, heads, n_q, n_k, d, d_v;
  std::int64_t block, width;  // 0: no block mask
  void *q, *k, *v, *out, *lse, *nonzeros, *metadata, *counts, *columns, *workspace, *stream;
  std::int64_t workspace_bytes;
};

DType dtype_of(const Call& call) { return call.dtype == 0 ? DType::f32 : call.dtype == 1 ? DType::f16 : DType::bf16; }

Device device_of(const Call& call) {
  return call.device < 0 ? Device{} : Device{DeviceType::cuda, static_cast<int>(call.device)};
}

BlockMaskView blocks_of(const Call& call) {
  BlockMaskView blocks;
  if (call.block == 0) return blocks;
  const std::int64_t rows = (call.n_q + call.block - 1) / call.block;
  blocks.block = static_cast<int>(call.block);
  blocks.counts = {call.counts, DType::i32, {rows}};
  blocks.columns = {call.columns, DType::i32, {rows, call.width}};
  return blocks;
}

SparseMatrices matrices_of(const Call& call) {
  SparseMatrices matrices;
  matrices.shape = {dtype_of(call),
                    {static_cast<int>(call.keep), static_cast<int>(call.group)},
                    call.interleaved != 0 ? Grouping::interleaved : Grouping::consecutive,
                    call.batch,
                    call.heads,
                    call.n_q,
                    call.n_k,
                    static_cast<int>(call.block),
                    call.width};
  matrices.nonzeros = call.nonzeros;
  matrices.metadata = call.metadata;
  return matrices;
}

Problem problem_of(const Call& call) {
  Problem problem;
  problem.device = device_of(call);
  problem.q = {call.q, dtype_of(call), {call.batch, call.heads, call.n_q, call.d}};
  problem.k = {call.k, dtype_of(call), {call.batch, call.heads, call.n_k, call.d}};
  problem.v = {call.v, dtype_of(call), {call.batch, call.heads, call.n_k, call.d_v}};
  problem.pattern = {static_cast<int>(call.keep), static_cast<int>(call.group)};
  problem.grouping = call.interleaved != 0 ? Grouping::interleaved : Grouping::consecutive;
  problem.mask.causal = call.causal != 0;
  return problem;
}

TensorView out_of(const Call& call) { return {call.out, dtype_of(call), {call.batch, call.heads, call.n_q, call.d_v}}; }

TensorView lse_of(const Call& call) {
  if (call.lse == nullptr) return {};
  return {call.lse, DType::f32, {call.batch, call.heads, call.n_q}};
}

Execution run_of(const Call& call) {
  Execution run;
  run.stream = call.stream;
  run.workspace = call.workspace;
  run.workspace_bytes = static_cast<std::size_t>(call.workspace_bytes);
  return run;
}

template <typename Body>
const char* guarded(Body body) {
  static thread_local std::string message;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

extern "C" {

std::int64_t pipeline_nonzeros_bytes(const Call* call) {
  return static_cast<std::int64_t>(matrices_of(*call).shape.nonzeros_bytes());
}
std::int64_t pipeline_metadata_bytes(const Call* call) {
  return static_cast<std::int64_t>(matrices_of(*call).shape.metadata_bytes());
}

const char* pipeline_qk_prune(const Call* call) {
  return guarded([&] {
    const Problem problem = problem_of(*call);
    Execution run = run_of(*call);
    run.workspace = nullptr;
    run.workspace_bytes = 0;
    qk_prune({.device = problem.device,
              .q = problem.q,
              .k = problem.k,
              .mask = problem.mask,
              .blocks = blocks_of(*call),
              .scores = matrices_of(*call),
              .run = run});
  });
}

const char* pipeline_softmax(const Call* call) {
  return guarded([&] {
    nonzero_softmax({.device = device_of(*call),
                     .matrices = matrices_of(*call),
                     .blocks = blocks_of(*call),
                     .lse = lse_of(*call),
                     .run = run_of(*call)});
  });
}

const char* pipeline_pv_sparse(const Call* call) {
  return guarded([&] {
    pv_sparse({.device = device_of(*call),
               .weights = matrices_of(*call),
               .v = problem_of(*call).v,
               .blocks = blocks_of(*call),
               .out = out_of(*call),
               .run = run_of(*call)});
  });
}

const char* pipeline_chain(const Call* call) {
  return guarded([&] {
    pipeline_forward({problem_of(*call), out_of(*call), lse_of(*call), run_of(*call)}, blocks_of(*call));
  });
}

}  // extern "C"
