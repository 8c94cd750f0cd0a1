// dspattn::norm_rope for CPU and CUDA tensors, on PyTorch's stable ABI.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "dspattn/norm_rope.h"
#include "place.h"
#include "stack.h"
#include "views.h"

namespace dspattn::torch_binding {
namespace {

using Tensors = std::vector<Tensor>;

std::string named(const char* argument, std::size_t index) {
  return std::string(argument) + "[" + std::to_string(index) + "]";
}

// Room for the parts, end to end along the tokens; each part with its slice of it is added to the call.
Tensor join(NormRopeArgs& args, const Tensors& parts, const Tensors& weights, const char* argument) {
  const std::string of_weight = std::string(argument) + "_weight";
  if (parts.empty()) throw Error(std::string(argument) + ": expected at least one part, got none");
  if (!weights.empty() && weights.size() != parts.size()) {
    throw Error(of_weight + ": expected one for each of " + std::to_string(parts.size()) + " parts or none, got " +
                std::to_string(weights.size()));
  }
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    require_device(parts[i], named(argument, i), args.device);
    const auto sizes = parts[i].sizes();
    if (sizes.size() != 4) {
      throw Error(named(argument, i) + ": expected four dimensions [batch, n, heads, d], got " +
                  std::to_string(sizes.size()));
    }
    // Parts lie in one tensor: what the library compares of each, but of the heads, which it lets differ.
    if (sizes[2] != parts[0].sizes()[2]) {
      throw Error(named(argument, i) + ": expected " + std::to_string(parts[0].sizes()[2]) +
                  " heads as the first part has, got " + std::to_string(sizes[2]));
    }
    tokens += sizes[1];
  }
  const auto first = parts[0].sizes();
  Tensor out =
      empty_like_strided(parts[0], scalar_type_of(parts[0]), {first[0], tokens, first[2], first[3]}, {0, 1, 2, 3});
  const TensorView whole = mutable_view(out, argument);
  std::int64_t token = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    NormRopePart part;
    part.x = const_view(parts[i], named(argument, i));
    if (!weights.empty()) {
      require_device(weights[i], named(of_weight.c_str(), i), args.device);
      part.weight = const_view(weights[i], named(of_weight.c_str(), i));
    }
    part.first_position = token;
    part.out = whole;
    part.out.shape[1] = part.x.extent(1);
    part.out.data =
        static_cast<char*>(whole.data) + token * whole.step(1) * static_cast<std::int64_t>(size_bytes(whole.dtype));
    token += part.x.extent(1);
    args.parts.push_back(part);
  }
  return out;
}

// norm_rope(q, k, q_weight, k_weight, eps, cos, sin, halves) -> (q, k)
void run_norm_rope(Stack& stack) {
  const auto q = stack.take<Tensors>(), k = stack.take<Tensors>();
  const auto q_weight = stack.take<Tensors>(), k_weight = stack.take<Tensors>();
  NormRopeArgs args;
  args.eps = stack.maybe_real();
  const MaybeTensor cos = stack.maybe_tensor();
  const MaybeTensor sin = stack.maybe_tensor();
  args.pairs = stack.boolean() ? RopePairs::halves : RopePairs::neighbours;
  if (q.empty()) throw Error("q: expected at least one part, got none");
  args.device = device_of(q[0], "q[0]");
  if (cos) require_device(*cos, "cos", args.device);
  if (sin) require_device(*sin, "sin", args.device);
  const DeviceScope scope(args.device);
  const Tensor joined_q = join(args, q, q_weight, "q"), joined_k = join(args, k, k_weight, "k");
  args.cos = const_view(cos, "cos", "float32");
  args.sin = const_view(sin, "sin", "float32");
  args.run = execution_on(args.device);
  norm_rope(args);
  stack.give(joined_q, joined_k);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dspattn, library) {
  library.def(
      "norm_rope(Tensor[] q, Tensor[] k, Tensor[] q_weight, Tensor[] k_weight, float? eps, Tensor? cos, Tensor? sin, "
      "bool halves) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(dspattn, CPU, library) { library.impl("norm_rope", &boxed<run_norm_rope>); }

STABLE_TORCH_LIBRARY_IMPL(dspattn, CUDA, library) { library.impl("norm_rope", &boxed<run_norm_rope>); }

}  // namespace dspattn::torch_binding
