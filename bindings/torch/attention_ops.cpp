// dspattn::attention and dspattn::attention_backward for CPU and CUDA tensors, on PyTorch's stable ABI.
//
// The schemas are the library's Problem spelled out; meta implementations, autograd and autocast are registered from
// Python (python/dspattn/_ops.py).
#include <torch/csrc/stable/library.h>

#include <string>

#include "dspattn/attention.h"
#include "place.h"
#include "stack.h"
#include "views.h"

namespace dspattn::torch_binding {
namespace {

// The arguments that describe a problem, in the order of kProblemSchema.
struct ProblemArguments {
  Tensor q, k, v;
  MaybeTensor allowed, bias, key_lengths, cu_q, cu_k;
  std::int64_t max_q, max_k;
  PatternNumbers pattern;
  bool interleaved, causal, top_left;
  std::optional<std::int64_t> window_left, window_right;
  std::optional<double> scale;
  bool full_fp32;
  std::string kernel;
  std::int64_t offset;
  bool fp32_results;

  // Members are initialised in the order of their declaration, which is that of the schema.
  explicit ProblemArguments(Stack& in)
      : q(in.tensor()),
        k(in.tensor()),
        v(in.tensor()),
        allowed(in.maybe_tensor()),
        bias(in.maybe_tensor()),
        key_lengths(in.maybe_tensor()),
        cu_q(in.maybe_tensor()),
        cu_k(in.maybe_tensor()),
        max_q(in.integer()),
        max_k(in.integer()),
        pattern(in.pattern()),
        interleaved(in.boolean()),
        causal(in.boolean()),
        top_left(in.boolean()),
        window_left(in.maybe_integer()),
        window_right(in.maybe_integer()),
        scale(in.maybe_real()),
        full_fp32(in.boolean()),
        kernel(in.text()),
        offset(in.integer()),
        fp32_results(in.boolean()) {}

  Problem problem() const {
    Problem p;
    p.device = device_of(q, "q");
    require_same_device(p.device);
    p.q = const_view(q, "q");
    p.k = const_view(k, "k");
    p.v = const_view(v, "v");
    p.pattern = pattern.checked();
    p.grouping = interleaved ? Grouping::interleaved : Grouping::consecutive;
    p.mask.causal = causal;
    p.mask.alignment = top_left ? Alignment::top_left : Alignment::bottom_right;
    p.mask.offset = offset;
    p.mask.window_left = window_left;
    p.mask.window_right = window_right;
    p.mask.key_lengths = const_view(key_lengths, "key_lengths", "int32");
    p.mask.allowed = const_view(allowed, "allowed", "bool");
    p.mask.bias = const_view(bias, "bias");
    p.scale = scale;
    p.fp32_products = full_fp32 ? Fp32Products::full : Fp32Products::tf32_allowed;
    if (cu_q || cu_k)
      p.packed = Packed{const_view(cu_q, "cu_q", "int32"), const_view(cu_k, "cu_k", "int32"), max_q, max_k};
    return p;
  }

 private:
  void require_same_device(Device device) const {
    require_device(k, "k", device);
    require_device(v, "v", device);
    const std::pair<const MaybeTensor*, const char*> optional_tensors[] = {
        {&allowed, "allowed"}, {&bias, "bias"}, {&key_lengths, "key_lengths"}, {&cu_q, "cu_q"}, {&cu_k, "cu_k"}};
    for (const auto& [tensor, argument] : optional_tensors) {
      if (*tensor) require_device(**tensor, argument, device);
    }
  }
};

// [batch, heads, n, d] with the heads of one position next to each other, so that joining the heads afterwards, as
// every model does, copies nothing. In the type of `like`, or fp32.
Tensor empty_heads(const Tensor& like, std::int64_t d, bool fp32) {
  const std::int32_t type = fp32 ? aoti_torch_dtype_float32() : scalar_type_of(like);
  return empty_like_strided(like, type, {like.size(0), like.size(1), like.size(2), d}, {0, 2, 1, 3});
}

Tensor empty_gradient(const Tensor& of, bool fp32) { return empty_heads(of, of.size(3), fp32); }

void require_rank_4(const Tensor& tensor, std::string_view argument) {
  if (tensor.dim() != 4) {
    throw Error(std::string(argument) + ": expected 4 dimensions [batch, heads, n, d], got " +
                std::to_string(tensor.dim()));
  }
}

void run_forward(Stack& stack) {
  const ProblemArguments given(stack);
  require_rank_4(given.q, "q");
  require_rank_4(given.v, "v");
  ForwardArgs args;
  args.problem = given.problem();
  const DeviceScope scope(args.problem.device);
  const Tensor out = empty_heads(given.q, given.v.size(3), given.fp32_results);
  const Tensor lse = empty_like_strided(given.q, aoti_torch_dtype_float32(),
                                        {given.q.size(0), given.q.size(1), given.q.size(2)}, {0, 1, 2});
  args.out = mutable_view(out, "out");
  args.lse = mutable_view(lse, "lse");
  args.run = execution_on(args.problem.device);
  args.run.kernel = given.kernel;
  Prepared call(args);
  const Workspace workspace(given.q, call.workspace_bytes());
  call.run(workspace.address(), workspace.bytes());
  stack.give(out, lse);
}

void run_backward(Stack& stack) {
  const Tensor d_out = stack.tensor();
  const Tensor out = stack.tensor();
  const Tensor lse = stack.tensor();
  const ProblemArguments given(stack);
  require_rank_4(given.q, "q");
  require_rank_4(given.k, "k");
  require_rank_4(given.v, "v");
  BackwardArgs args;
  args.problem = given.problem();
  require_device(d_out, "d_out", args.problem.device);
  require_device(out, "out", args.problem.device);
  require_device(lse, "lse", args.problem.device);
  const DeviceScope scope(args.problem.device);
  const Tensor d_q = empty_gradient(given.q, given.fp32_results);
  const Tensor d_k = empty_gradient(given.k, given.fp32_results);
  const Tensor d_v = empty_gradient(given.v, given.fp32_results);
  args.out = const_view(out, "out");
  args.lse = const_view(lse, "lse");
  args.d_out = const_view(d_out, "d_out");
  args.d_q = mutable_view(d_q, "d_q");
  args.d_k = mutable_view(d_k, "d_k");
  args.d_v = mutable_view(d_v, "d_v");
  args.run = execution_on(args.problem.device);
  args.run.kernel = given.kernel;
  Prepared call(args);
  const Workspace workspace(given.q, call.workspace_bytes());
  call.run(workspace.address(), workspace.bytes());
  stack.give(d_q, d_k, d_v);
}

// What ProblemArguments reads, in its order.
const std::string kProblemSchema =
    "Tensor q, Tensor k, Tensor v, Tensor? allowed, Tensor? bias, Tensor? key_lengths, Tensor? cu_q, Tensor? cu_k, "
    "SymInt max_q, SymInt max_k, int keep, int group, bool interleaved, bool causal, bool top_left, "
    "SymInt? window_left, SymInt? window_right, float? scale, bool full_fp32, str kernel, "
    "SymInt offset=0, bool fp32_results=False";

}  // namespace

STABLE_TORCH_LIBRARY(dspattn, library) {
  library.def(("attention(" + kProblemSchema + ") -> (Tensor out, Tensor lse)").c_str());
  library.def(("attention_backward(Tensor d_out, Tensor out, Tensor lse, " + kProblemSchema +
               ") -> (Tensor d_q, Tensor d_k, Tensor d_v)")
                  .c_str());
}

STABLE_TORCH_LIBRARY_IMPL(dspattn, CPU, library) {
  library.impl("attention", &boxed<run_forward>);
  library.impl("attention_backward", &boxed<run_backward>);
}

STABLE_TORCH_LIBRARY_IMPL(dspattn, CUDA, library) {
  library.impl("attention", &boxed<run_forward>);
  library.impl("attention_backward", &boxed<run_backward>);
}

}  // namespace dspattn::torch_binding
