// Blocked-ELL masks and the attention that takes one, on PyTorch's stable ABI: the library's block_mask.h and
// pipeline_forward. Meta implementations and gradients are registered from Python (python/dspattn/block_masks.py).
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>
#include <utility>

#include "dspattn/pipeline.h"
#include "place.h"
#include "stack.h"
#include "views.h"

namespace dspattn::torch_binding {
namespace {

// The library counts these in int: 2^32 + 64 must not pass for 64.
int as_int(std::int64_t value, const char* argument) {
  if (!std::in_range<int>(value)) {
    throw Error(std::string(argument) + ": expected a number of 32 bits, got " + std::to_string(value));
  }
  return static_cast<int>(value);
}

// block_mask(like, n_q, n_k, block, window, global_blocks, random, seed, causal) -> (counts, columns)
// `like` is any CPU tensor: an operator without one has no place to run.
void run_block_mask(Stack& stack) {
  const Tensor like = stack.tensor();
  const std::int64_t n_q = stack.integer();
  const std::int64_t n_k = stack.integer();
  BigbirdParts parts;
  const std::int64_t block = stack.integer();
  parts.window = stack.integer();
  parts.global = stack.integer();
  parts.random = stack.integer();
  parts.seed = static_cast<std::uint64_t>(stack.integer());
  parts.causal = stack.boolean();
  parts.block = as_int(block, "block");
  const BlockMask mask = bigbird_blocks(n_q, n_k, parts);
  const Tensor counts = empty_like_strided(like, aoti_torch_dtype_int32(), {mask.block_rows()}, {0});
  const Tensor columns = empty_like_strided(like, aoti_torch_dtype_int32(), {mask.block_rows(), mask.width}, {0, 1});
  std::ranges::copy(mask.counts, static_cast<std::int32_t*>(counts.mutable_data_ptr()));
  std::ranges::copy(mask.columns, static_cast<std::int32_t*>(columns.mutable_data_ptr()));
  stack.give(counts, columns);
}

// block_attention(q, k, v, counts, columns, allowed, bias, key_lengths, block, keep, group, interleaved, causal,
//                 top_left, scale, full_fp32) -> (out, lse)
void run_block_attention(Stack& stack) {
  const Tensor q = stack.tensor();
  const Tensor k = stack.tensor();
  const Tensor v = stack.tensor();
  const Tensor counts = stack.tensor();
  const Tensor columns = stack.tensor();
  const MaybeTensor allowed = stack.maybe_tensor();
  const MaybeTensor bias = stack.maybe_tensor();
  const MaybeTensor key_lengths = stack.maybe_tensor();
  BlockMaskView blocks;
  const std::int64_t block = stack.integer();
  ForwardArgs args;
  Problem& problem = args.problem;
  const std::int64_t keep = stack.integer();
  const std::int64_t group = stack.integer();
  problem.grouping = stack.boolean() ? Grouping::interleaved : Grouping::consecutive;
  problem.mask.causal = stack.boolean();
  problem.mask.alignment = stack.boolean() ? Alignment::top_left : Alignment::bottom_right;
  problem.scale = stack.maybe_real();
  problem.fp32_products = stack.boolean() ? Fp32Products::full : Fp32Products::tf32_allowed;
  blocks.block = as_int(block, "blocks.block");
  problem.pattern = {as_int(keep, "pattern.keep"), as_int(group, "pattern.group")};
  if (q.dim() != 4) throw Error("q: expected 4 dimensions [batch, heads, n, d], got " + std::to_string(q.dim()));
  if (v.dim() != 4) throw Error("v: expected 4 dimensions [batch, heads, n, d], got " + std::to_string(v.dim()));
  problem.device = device_of(q, "q");
  const std::pair<const Tensor*, const char*> tensors[] = {
      {&k, "k"}, {&v, "v"}, {&counts, "blocks.counts"}, {&columns, "blocks.columns"}};
  for (const auto& [tensor, argument] : tensors) require_device(*tensor, argument, problem.device);
  const std::pair<const MaybeTensor*, const char*> optional_tensors[] = {
      {&allowed, "allowed"}, {&bias, "bias"}, {&key_lengths, "key_lengths"}};
  for (const auto& [tensor, argument] : optional_tensors) {
    if (*tensor) require_device(**tensor, argument, problem.device);
  }
  problem.q = const_view(q, "q");
  problem.k = const_view(k, "k");
  problem.v = const_view(v, "v");
  problem.mask.key_lengths = const_view(key_lengths, "key_lengths", "int32");
  problem.mask.allowed = const_view(allowed, "allowed", "bool");
  problem.mask.bias = const_view(bias, "bias");
  blocks.counts = const_view(counts, "blocks.counts", "int32");
  blocks.columns = const_view(columns, "blocks.columns", "int32");
  const DeviceScope scope(problem.device);
  const Tensor out =
      empty_like_strided(q, scalar_type_of(q), {q.size(0), q.size(1), q.size(2), v.size(3)}, {0, 1, 2, 3});
  const Tensor lse = empty_like_strided(q, aoti_torch_dtype_float32(), {q.size(0), q.size(1), q.size(2)}, {0, 1, 2});
  args.out = mutable_view(out, "out");
  args.lse = mutable_view(lse, "lse");
  args.run = execution_on(problem.device);
  const Workspace workspace(q, pipeline_workspace_bytes(args, blocks));
  args.run.workspace = workspace.address();
  args.run.workspace_bytes = workspace.bytes();
  pipeline_forward(args, blocks);
  stack.give(out, lse);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dspattn, library) {
  library.def(
      "block_mask(Tensor like, int n_q, int n_k, int block, int window, int global_blocks, int random, int seed, "
      "bool causal) -> (Tensor counts, Tensor columns)");
  library.def(
      "block_attention(Tensor q, Tensor k, Tensor v, Tensor counts, Tensor columns, Tensor? allowed, Tensor? bias, "
      "Tensor? key_lengths, int block, int keep, int group, bool interleaved, bool causal, bool top_left, "
      "float? scale, bool full_fp32) -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(dspattn, CPU, library) {
  library.impl("block_mask", &boxed<run_block_mask>);
  library.impl("block_attention", &boxed<run_block_attention>);
}

STABLE_TORCH_LIBRARY_IMPL(dspattn, CUDA, library) { library.impl("block_attention", &boxed<run_block_attention>); }

}  // namespace dspattn::torch_binding
