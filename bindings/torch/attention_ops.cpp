// dspattn::attention and dspattn::attention_backward for CPU and CUDA tensors, on PyTorch's stable ABI.
//
// The schemas are the library's Problem spelled out; python/dspattn/_schema.py has the same list for Python, where meta
// implementations, autograd and autocast are registered.
#include <torch/csrc/stable/library.h>

#include <string>

#include "dspattn/attention.h"
#include "place.h"
#include "stack.h"
#include "views.h"

namespace dspattn::torch_binding {
namespace {

// The arguments that describe a problem. The list in each() is the only one: the operators' schema is made of it, and
// the arguments are read off PyTorch's stack in its order.
struct ProblemArguments {
  Tensor q, k, v;
  MaybeTensor allowed, bias, key_lengths, cu_q, cu_k, sinks, block_table, dropout_state, value_sums;
  std::int64_t max_q = 0, max_k = 0, keep = 0, group = 0;
  bool interleaved = false, causal = false, top_left = false;
  std::optional<std::int64_t> window_left, window_right;
  std::optional<double> scale;
  bool full_fp32 = false;
  std::string kernel;
  std::int64_t offset = 0;
  bool fp32_results = false;
  bool rest_mean = false;
  bool shared_choice = false;
  double dropout = 0;
  std::optional<double> soft_cap;

  explicit ProblemArguments(Stack& in) {
    each([&](const char*, auto member) { in.read(this->*member); });
  }

  static std::string schema() {
    std::string text;
    each([&](const char* argument, auto) { text += (text.empty() ? "" : ", ") + std::string(argument); });
    return text;
  }

  Problem problem() const {
    Problem p;
    p.device = device_of(q, "q");
    require_same_device(p.device);
    p.q = const_view(q, "q");
    p.k = const_view(k, "k");
    p.v = const_view(v, "v");
    p.pattern = PatternNumbers{keep, group}.checked();
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
    p.rest = rest_mean ? Rest::mean : Rest::drop;
    p.choice = shared_choice ? Choice::shared : Choice::each_head;
    p.dropout.probability = dropout;
    p.dropout.state = const_view(dropout_state, "dropout_state", "int32");
    p.soft_cap = soft_cap;
    p.sinks = const_view(sinks, "sinks");
    p.block_table = const_view(block_table, "block_table", "int32");
    p.value_sums = const_view(value_sums, "value_sums");
    return p;
  }

 private:
  // Calls visit(argument in PyTorch's schema language, member) for every argument, in the operators' order.
  template <typename Visit>
  static void each(Visit visit) {
    using A = ProblemArguments;
    visit("Tensor q", &A::q);
    visit("Tensor k", &A::k);
    visit("Tensor v", &A::v);
    visit("Tensor? allowed", &A::allowed);
    visit("Tensor? bias", &A::bias);
    visit("Tensor? key_lengths", &A::key_lengths);
    visit("Tensor? cu_q", &A::cu_q);
    visit("Tensor? cu_k", &A::cu_k);
    visit("Tensor? sinks", &A::sinks);
    visit("Tensor? block_table", &A::block_table);
    visit("Tensor? dropout_state", &A::dropout_state);
    visit("Tensor? value_sums", &A::value_sums);
    visit("SymInt max_q", &A::max_q);
    visit("SymInt max_k", &A::max_k);
    visit("int keep", &A::keep);
    visit("int group", &A::group);
    visit("bool interleaved", &A::interleaved);
    visit("bool causal", &A::causal);
    visit("bool top_left", &A::top_left);
    visit("SymInt? window_left", &A::window_left);
    visit("SymInt? window_right", &A::window_right);
    visit("float? scale", &A::scale);
    visit("bool full_fp32", &A::full_fp32);
    visit("str kernel", &A::kernel);
    visit("SymInt offset=0", &A::offset);
    visit("bool fp32_results=False", &A::fp32_results);
    visit("bool rest_mean=False", &A::rest_mean);
    visit("bool shared_choice=False", &A::shared_choice);
    visit("float dropout=0.0", &A::dropout);
    visit("float? soft_cap=None", &A::soft_cap);
  }

  void require_same_device(Device device) const {
    require_device(k, "k", device);
    require_device(v, "v", device);
    const std::pair<const MaybeTensor*, const char*> optional_tensors[] = {{&allowed, "allowed"},
                                                                           {&bias, "bias"},
                                                                           {&key_lengths, "key_lengths"},
                                                                           {&cu_q, "cu_q"},
                                                                           {&cu_k, "cu_k"},
                                                                           {&sinks, "sinks"},
                                                                           {&block_table, "block_table"},
                                                                           {&dropout_state, "dropout_state"},
                                                                           {&value_sums, "value_sums"}};
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

// The gradient of something optional: in its shape, or an empty tensor where it is not asked for.
Tensor empty_optional(const MaybeTensor& of, bool wanted, std::int32_t type, const Tensor& like) {
  if (!wanted || !of) return empty_like_strided(like, aoti_torch_dtype_float32(), {0}, {0});
  const Tensor& tensor = *of;
  if (tensor.dim() != 4) return empty_like_strided(like, type, {tensor.size(0)}, {0});
  return empty_like_strided(like, type, {tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)}, {0, 1, 2, 3});
}

void run_backward(Stack& stack) {
  const Tensor d_out = stack.tensor();
  const Tensor out = stack.tensor();
  const Tensor lse = stack.tensor();
  const MaybeTensor d_lse = stack.maybe_tensor();
  const bool wants_d_bias = stack.boolean();
  const bool wants_d_sinks = stack.boolean();
  const ProblemArguments given(stack);
  require_rank_4(given.q, "q");
  require_rank_4(given.k, "k");
  require_rank_4(given.v, "v");
  BackwardArgs args;
  args.problem = given.problem();
  require_device(d_out, "d_out", args.problem.device);
  require_device(out, "out", args.problem.device);
  require_device(lse, "lse", args.problem.device);
  if (d_lse) require_device(*d_lse, "d_lse", args.problem.device);
  if (wants_d_bias && !given.bias) throw Error("wants_d_bias: expected False without a bias, got True");
  if (wants_d_sinks && !given.sinks) throw Error("wants_d_sinks: expected False without sinks, got True");
  const DeviceScope scope(args.problem.device);
  const Tensor d_q = empty_gradient(given.q, given.fp32_results);
  const Tensor d_k = empty_gradient(given.k, given.fp32_results);
  const Tensor d_v = empty_gradient(given.v, given.fp32_results);
  const std::int32_t fp32 = aoti_torch_dtype_float32();
  const std::int32_t bias_type = given.bias && !given.fp32_results ? scalar_type_of(*given.bias) : fp32;
  const Tensor d_bias = empty_optional(given.bias, wants_d_bias, bias_type, given.q);
  const Tensor d_sinks = empty_optional(given.sinks, wants_d_sinks, fp32, given.q);
  args.out = const_view(out, "out");
  args.lse = const_view(lse, "lse");
  args.d_out = const_view(d_out, "d_out");
  args.d_q = mutable_view(d_q, "d_q");
  args.d_k = mutable_view(d_k, "d_k");
  args.d_v = mutable_view(d_v, "d_v");
  args.d_lse = const_view(d_lse, "d_lse");
  if (wants_d_bias) args.d_bias = mutable_view(d_bias, "d_bias");
  if (wants_d_sinks) args.d_sinks = mutable_view(d_sinks, "d_sinks");
  args.run = execution_on(args.problem.device);
  args.run.kernel = given.kernel;
  Prepared call(args);
  const Workspace workspace(given.q, call.workspace_bytes());
  call.run(workspace.address(), workspace.bytes());
  stack.give(d_q, d_k, d_v, d_bias, d_sinks);
}

}  // namespace

STABLE_TORCH_LIBRARY(dspattn, library) {
  const std::string problem = ProblemArguments::schema();
  library.def(("attention(" + problem + ") -> (Tensor out, Tensor lse)").c_str());
  library.def(("attention_backward(Tensor d_out, Tensor out, Tensor lse, Tensor? d_lse, bool wants_d_bias, "
               "bool wants_d_sinks, " +
               problem + ") -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_bias, Tensor d_sinks)")
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
