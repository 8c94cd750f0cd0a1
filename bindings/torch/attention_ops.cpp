// dspattn::attention and dspattn::attention_backward for CPU and CUDA tensors, on PyTorch's stable ABI, and the same
// for calls of q, k and v alone.
//
// The schemas are the library's Problem spelled out; python/dspattn/_schema.py has the same list for Python, where meta
// implementations, autograd and autocast are registered. PyTorch looks at every argument of a call, which for these
// thirty takes longer than all that the library does: calls without other tensors and rare options, nearly all there
// are, have operators of five arguments (python/dspattn/_qkv.py).
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>
#include <utility>

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
  bool heads_last = false;  // of brief calls alone: out and d_out are [batch, n_q, heads, d_v]

  explicit ProblemArguments(Stack& in) {
    each([&](const char*, auto member) { in.read(this->*member); });
  }

  // Of q, k and v alone: everything else is in one number, and the scale.
  enum class Brief : std::uint8_t { qkv };
  ProblemArguments(Stack& in, Brief) : q(in.tensor()), k(in.tensor()), v(in.tensor()) {
    std::int64_t options = in.integer();
    scale = in.maybe_real();
    const auto next = [&](int bits) {
      const std::int64_t field = options & ((std::int64_t{1} << bits) - 1);
      options >>= bits;
      return field;
    };
    keep = next(kPatternBits);
    group = next(kPatternBits);
    for (bool ProblemArguments::*flag : kFlags) this->*flag = next(1) != 0;
    for (std::optional<std::int64_t> ProblemArguments::*side :
         {&ProblemArguments::window_left, &ProblemArguments::window_right}) {
      const std::int64_t beyond = next(kWindowBits);
      if (beyond > 0) this->*side = beyond - 1;
    }
    heads_last = next(1) != 0;
  }
  static constexpr const char* kBriefSchema = "Tensor q, Tensor k, Tensor v, int options, float? scale";

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
  // The fields of a brief call's options, from the lowest bit on: keep and group, a bit for each of these flags, the
  // sides of the window and 1, 0 for no bound, and heads_last.
  static constexpr int kPatternBits = 6, kWindowBits = 22;
  static constexpr bool ProblemArguments::*kFlags[] = {
      &ProblemArguments::interleaved, &ProblemArguments::causal,    &ProblemArguments::top_left,
      &ProblemArguments::full_fp32,   &ProblemArguments::rest_mean, &ProblemArguments::shared_choice};

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
// every model does, copies nothing; or the same memory as [batch, n, heads, d]. In the type of `like`, or fp32.
Tensor empty_heads(const Tensor& like, std::int64_t d, bool fp32, bool heads_last = false) {
  const std::int32_t type = fp32 ? aoti_torch_dtype_float32() : scalar_type_of(like);
  const std::int64_t batch = like.size(0), heads = like.size(1), n = like.size(2);
  if (heads_last) return empty_like_strided(like, type, {batch, n, heads, d}, {0, 1, 2, 3});
  return empty_like_strided(like, type, {batch, heads, n, d}, {0, 2, 1, 3});
}

// In the shape of something with one dimension or four, contiguous.
Tensor empty_as(const Tensor& tensor, std::int32_t type) {
  if (tensor.dim() != 4) return empty_like_strided(tensor, type, {tensor.size(0)}, {0});
  return empty_like_strided(tensor, type, {tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)},
                            {0, 1, 2, 3});
}

void require_rank_4(const Tensor& tensor, std::string_view argument) {
  if (tensor.dim() != 4) {
    throw Error(std::string(argument) + ": expected 4 dimensions [batch, heads, n, d], got " +
                std::to_string(tensor.dim()));
  }
}

// A view of the dimensions in the library's order.
template <typename View>
View heads_first(View view, bool heads_last) {
  if (heads_last && view.rank == 4) {
    std::swap(view.shape[1], view.shape[2]);
    std::swap(view.stride[1], view.stride[2]);
  }
  return view;
}

struct Outputs {
  Tensor out, lse;
};

Outputs forward_of(const ProblemArguments& given) {
  require_rank_4(given.q, "q");
  require_rank_4(given.v, "v");
  ForwardArgs args;
  args.problem = given.problem();
  const DeviceScope scope(args.problem.device);
  Tensor out = empty_heads(given.q, given.v.size(3), given.fp32_results, given.heads_last);
  Tensor lse = empty_like_strided(given.q, aoti_torch_dtype_float32(),
                                  {given.q.size(0), given.q.size(1), given.q.size(2)}, {0, 1, 2});
  args.out = heads_first(mutable_view(out, "out"), given.heads_last);
  args.lse = mutable_view(lse, "lse");
  args.run = execution_on(args.problem.device);
  args.run.kernel = given.kernel;
  Prepared call(args);
  const Workspace workspace(given.q, call.workspace_bytes());
  call.run(workspace.address(), workspace.bytes());
  return {std::move(out), std::move(lse)};
}

void run_forward(Stack& stack) {
  const ProblemArguments given(stack);
  const Outputs found = forward_of(given);
  stack.give(found.out, found.lse);
}

void run_forward_qkv(Stack& stack) {
  const ProblemArguments given(stack, ProblemArguments::Brief::qkv);
  const Outputs found = forward_of(given);
  stack.give(found.out, found.lse);
}

// What a backward call takes before its problem.
struct GradientArguments {
  Tensor d_out, out, lse;
  MaybeTensor d_lse = std::nullopt;
  bool wants_d_bias = false, wants_d_sinks = false;
};

struct Gradients {
  Tensor d_q, d_k, d_v;
  MaybeTensor d_bias, d_sinks;
};

Gradients backward_of(const GradientArguments& with, const ProblemArguments& given) {
  require_rank_4(given.q, "q");
  require_rank_4(given.k, "k");
  require_rank_4(given.v, "v");
  BackwardArgs args;
  args.problem = given.problem();
  require_device(with.d_out, "d_out", args.problem.device);
  require_device(with.out, "out", args.problem.device);
  require_device(with.lse, "lse", args.problem.device);
  if (with.d_lse) require_device(*with.d_lse, "d_lse", args.problem.device);
  if (with.wants_d_bias && !given.bias) throw Error("wants_d_bias: expected False without a bias, got True");
  if (with.wants_d_sinks && !given.sinks) throw Error("wants_d_sinks: expected False without sinks, got True");
  const DeviceScope scope(args.problem.device);
  const auto empty_gradient = [&](const Tensor& tensor) {
    return empty_heads(tensor, tensor.size(3), given.fp32_results);
  };
  Gradients found{empty_gradient(given.q), empty_gradient(given.k), empty_gradient(given.v), {}, {}};
  if (with.wants_d_bias) {
    const Tensor& bias = *given.bias;
    found.d_bias = empty_as(bias, given.fp32_results ? aoti_torch_dtype_float32() : scalar_type_of(bias));
    args.d_bias = mutable_view(*found.d_bias, "d_bias");
  }
  if (with.wants_d_sinks) {
    found.d_sinks = empty_as(*given.sinks, aoti_torch_dtype_float32());
    args.d_sinks = mutable_view(*found.d_sinks, "d_sinks");
  }
  args.out = heads_first(const_view(with.out, "out"), given.heads_last);
  args.lse = const_view(with.lse, "lse");
  args.d_out = heads_first(const_view(with.d_out, "d_out"), given.heads_last);
  args.d_q = mutable_view(found.d_q, "d_q");
  args.d_k = mutable_view(found.d_k, "d_k");
  args.d_v = mutable_view(found.d_v, "d_v");
  args.d_lse = const_view(with.d_lse, "d_lse");
  args.run = execution_on(args.problem.device);
  args.run.kernel = given.kernel;
  Prepared call(args);
  const Workspace workspace(given.q, call.workspace_bytes());
  call.run(workspace.address(), workspace.bytes());
  return found;
}

void run_backward(Stack& stack) {
  GradientArguments of{stack.tensor(), stack.tensor(), stack.tensor(), stack.maybe_tensor()};
  of.wants_d_bias = stack.boolean();
  of.wants_d_sinks = stack.boolean();
  const ProblemArguments given(stack);
  const Gradients found = backward_of(of, given);
  // What is not wanted is a tensor without elements.
  const auto or_empty = [&](const MaybeTensor& gradient) {
    return gradient ? *gradient : empty_like_strided(given.q, aoti_torch_dtype_float32(), {0}, {0});
  };
  stack.give(found.d_q, found.d_k, found.d_v, or_empty(found.d_bias), or_empty(found.d_sinks));
}

void run_backward_qkv(Stack& stack) {
  const GradientArguments of{stack.tensor(), stack.tensor(), stack.tensor()};
  const ProblemArguments given(stack, ProblemArguments::Brief::qkv);
  const Gradients found = backward_of(of, given);
  stack.give(found.d_q, found.d_k, found.d_v);
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("attention", &boxed<run_forward>);
  library.impl("attention_backward", &boxed<run_backward>);
  library.impl("_attention_qkv", &boxed<run_forward_qkv>);
  library.impl("_attention_qkv_backward", &boxed<run_backward_qkv>);
}

}  // namespace

STABLE_TORCH_LIBRARY(dspattn, library) {
  const std::string problem = ProblemArguments::schema();
  library.def(("attention(" + problem + ") -> (Tensor out, Tensor lse)").c_str());
  library.def(("attention_backward(Tensor d_out, Tensor out, Tensor lse, Tensor? d_lse, bool wants_d_bias, "
               "bool wants_d_sinks, " +
               problem + ") -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_bias, Tensor d_sinks)")
                  .c_str());
  const std::string brief = ProblemArguments::kBriefSchema;
  library.def(("_attention_qkv(" + brief + ") -> (Tensor out, Tensor lse)").c_str());
  library.def(("_attention_qkv_backward(Tensor d_out, Tensor out, Tensor lse, " + brief +
               ") -> (Tensor d_q, Tensor d_k, Tensor d_v)")
                  .c_str());
}

STABLE_TORCH_LIBRARY_IMPL(dspattn, CPU, library) { implement(library); }

STABLE_TORCH_LIBRARY_IMPL(dspattn, CUDA, library) { implement(library); }

}  // namespace dspattn::torch_binding
