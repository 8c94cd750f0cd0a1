// The paper's three steps as operators, on PyTorch's stable ABI: each takes and gives the sparse matrices in the
// layout of the library's SparseShape, rows padded to 32 and places to whole metadata words. Python pads, slices and
// differentiates (python/dspattn/sparse.py).
#include <torch/csrc/stable/library.h>

#include <string>

#include "dspattn/pipeline.h"
#include "place.h"
#include "stack.h"
#include "views.h"

namespace dspattn::torch_binding {
namespace {

void require_rank_4(const Tensor& tensor, std::string_view argument, const char* dimensions) {
  if (tensor.dim() != 4) {
    throw Error(std::string(argument) + ": expected 4 dimensions " + dimensions + ", got " +
                std::to_string(tensor.dim()));
  }
}

// Nonzeros or metadata as the library lays them out.
void require_layout(const Tensor& tensor, std::string_view argument, const SparseShape& shape, std::int64_t columns) {
  const std::int64_t wanted[4] = {shape.batch, shape.heads, shape.rows(), columns};
  bool fits = tensor.is_contiguous();
  std::string expected, got;
  for (int dim = 0; dim < 4; ++dim) {
    fits = fits && tensor.size(dim) == wanted[dim];
    expected += (dim == 0 ? "" : " x ") + std::to_string(wanted[dim]);
    got += (dim == 0 ? "" : " x ") + std::to_string(tensor.size(dim));
  }
  if (!fits) {
    throw Error(std::string(argument) + ": expected " + expected + ", contiguous, got " + got +
                (tensor.is_contiguous() ? "" : " with strides"));
  }
}

std::int64_t metadata_columns(const SparseShape& shape) {
  const std::int64_t rows = shape.matrices() * shape.rows();
  return rows == 0 ? 0 : static_cast<std::int64_t>(shape.metadata_bytes()) / 2 / rows;
}

// sparse_scores(q, k, allowed, bias, keep, group, interleaved, causal, top_left, scale) -> (nonzeros, metadata)
void run_scores(Stack& stack) {
  const Tensor q = stack.tensor();
  const Tensor k = stack.tensor();
  const MaybeTensor allowed = stack.maybe_tensor();
  const MaybeTensor bias = stack.maybe_tensor();
  const PatternNumbers given = stack.pattern();
  const Grouping grouping = grouping_of(stack.boolean());
  QkPruneArgs args;
  args.mask.causal = stack.boolean();
  args.mask.alignment = stack.boolean() ? Alignment::top_left : Alignment::bottom_right;
  args.scale = stack.maybe_real();
  const Pattern pattern = given.checked();
  require_rank_4(q, "q", "[batch, heads, n, d]");
  require_rank_4(k, "k", "[batch, heads, n, d]");
  args.device = device_of(q, "q");
  require_device(k, "k", args.device);
  if (allowed) require_device(*allowed, "allowed", args.device);
  if (bias) require_device(*bias, "bias", args.device);
  args.q = const_view(q, "q");
  args.k = const_view(k, "k");
  args.mask.allowed = const_view(allowed, "allowed", "bool");
  args.mask.bias = const_view(bias, "bias");
  const SparseShape shape{args.q.dtype, pattern, grouping, q.size(0), q.size(1), q.size(2), k.size(2)};
  const DeviceScope scope(args.device);
  const Tensor nonzeros = empty_like_strided(
      q, scalar_type_of(q), {shape.batch, shape.heads, shape.rows(), shape.nonzeros_per_row()}, {0, 1, 2, 3});
  const Tensor metadata = empty_like_strided(
      q, aoti_torch_dtype_int16(), {shape.batch, shape.heads, shape.rows(), metadata_columns(shape)}, {0, 1, 2, 3});
  args.scores = {shape, nonzeros.mutable_data_ptr(), metadata.mutable_data_ptr()};
  args.run = execution_on(args.device);
  qk_prune(args);
  stack.give(nonzeros, metadata);
}

// sparse_softmax_(nonzeros): in place, row by row. Which elements the nonzeros are does not matter, so that any stack
// of rows is one matrix of pairs.
void run_softmax(Stack& stack) {
  const Tensor nonzeros = stack.tensor();
  require_rank_4(nonzeros, "nonzeros", "[batch, heads, rows, nonzeros]");
  SoftmaxArgs args;
  args.device = device_of(nonzeros, "nonzeros");
  args.matrices.shape = {dtype_of(nonzeros, "nonzeros"),
                         {1, 2},
                         Grouping::consecutive,
                         nonzeros.size(0),
                         nonzeros.size(1),
                         nonzeros.size(2),
                         2 * nonzeros.size(3)};
  require_layout(nonzeros, "nonzeros", args.matrices.shape, args.matrices.shape.nonzeros_per_row());
  const DeviceScope scope(args.device);
  args.matrices.nonzeros = nonzeros.mutable_data_ptr();
  args.run = execution_on(args.device);
  nonzero_softmax(args);
}

// sparse_product(nonzeros, metadata, v, n_q, keep, group, interleaved) -> out
void run_product(Stack& stack) {
  const Tensor nonzeros = stack.tensor();
  const Tensor metadata = stack.tensor();
  const Tensor v = stack.tensor();
  const std::int64_t n_q = stack.integer();
  const PatternNumbers given = stack.pattern();
  const Grouping grouping = grouping_of(stack.boolean());
  const Pattern pattern = given.checked();
  if (n_q < 0) throw Error("n_q: expected at least 0, got " + std::to_string(n_q));
  require_rank_4(nonzeros, "nonzeros", "[batch, heads, rows, nonzeros]");
  require_rank_4(metadata, "metadata", "[batch, heads, rows, blocks]");
  require_rank_4(v, "v", "[batch, heads, n, d]");
  PvSparseArgs args;
  args.device = device_of(nonzeros, "nonzeros");
  require_device(metadata, "metadata", args.device);
  require_device(v, "v", args.device);
  const SparseShape shape{
      dtype_of(nonzeros, "nonzeros"), pattern, grouping, nonzeros.size(0), nonzeros.size(1), n_q, v.size(2)};
  require_layout(nonzeros, "nonzeros", shape, shape.nonzeros_per_row());
  require_layout(metadata, "metadata", shape, metadata_columns(shape));
  if (scalar_type_of(metadata) != aoti_torch_dtype_int16()) throw Error("metadata: expected int16, got another type");
  const DeviceScope scope(args.device);
  const Tensor out =
      empty_like_strided(nonzeros, scalar_type_of(nonzeros), {shape.batch, shape.heads, n_q, v.size(3)}, {0, 1, 2, 3});
  args.weights = {shape, nonzeros.mutable_data_ptr(), metadata.mutable_data_ptr()};
  args.v = const_view(v, "v");
  args.out = mutable_view(out, "out");
  args.run = execution_on(args.device);
  pv_sparse(args);
  stack.give(out);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dspattn, library) {
  library.def(
      "sparse_scores(Tensor q, Tensor k, Tensor? allowed, Tensor? bias, int keep, int group, bool interleaved, "
      "bool causal, bool top_left, float? scale) -> (Tensor nonzeros, Tensor metadata)");
  library.def("sparse_softmax_(Tensor(a!) nonzeros) -> ()");
  library.def(
      "sparse_product(Tensor nonzeros, Tensor metadata, Tensor v, SymInt n_q, int keep, int group, bool interleaved) "
      "-> Tensor out");
}

STABLE_TORCH_LIBRARY_IMPL(dspattn, CPU, library) {
  library.impl("sparse_scores", &boxed<run_scores>);
  library.impl("sparse_softmax_", &boxed<run_softmax>);
  library.impl("sparse_product", &boxed<run_product>);
}

STABLE_TORCH_LIBRARY_IMPL(dspattn, CUDA, library) {
  library.impl("sparse_scores", &boxed<run_scores>);
  library.impl("sparse_softmax_", &boxed<run_softmax>);
  library.impl("sparse_product", &boxed<run_product>);
}

}  // namespace dspattn::torch_binding
