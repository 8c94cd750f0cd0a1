// The checks of an attention call: of its problem (problem_checks.h), then of its results, of how to run it, and of
// what overlaps. Tensor-level checks are in tensor_checks.h.
#include "core/validate.h"

#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/problem_checks.h"
#include "core/tensor_checks.h"
#include "dspattn/error.h"

namespace dspattn::core {
namespace {

constexpr std::size_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

void check_execution(Report& report, const Problem& problem, const Execution& run) {
  if (problem.device.type == DeviceType::cpu && run.stream != nullptr) {
    report.add("stream", "null for CPU tensors", hex(run.stream));
  }
  if (run.threads < 0) report.add("threads", ">= 0", std::to_string(run.threads));
  if (run.workspace == nullptr && run.workspace_bytes > 0) {
    report.add("workspace", "memory of workspace_bytes = " + std::to_string(run.workspace_bytes), "null");
  }
  if (run.workspace_bytes > kMaxBytes) {
    report.add("workspace_bytes", "at most 2^63 - 1", std::to_string(run.workspace_bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(run.workspace) % kWorkspaceAlignment != 0) {
    report.add("workspace", "an address aligned to " + std::to_string(kWorkspaceAlignment) + " bytes",
               hex(run.workspace));
  }
}

// The tensors of one call that are compared for overlap: at most those of a packed backward pass.
class Operands {
 public:
  struct Operand {
    std::string_view argument;
    ConstTensorView view;
  };

  Operands(std::initializer_list<Operand> operands) {
    for (const Operand& operand : operands) add(operand);
  }

  void add(const Operand& operand) { items_[count_++] = operand; }
  std::span<const Operand> all() const { return std::span(items_).first(count_); }

 private:
  std::array<Operand, 16> items_;
  std::size_t count_ = 0;
};

Operands problem_operands(const Problem& problem) {
  Operands operands{{"q", problem.q},
                    {"k", problem.k},
                    {"v", problem.v},
                    {"mask.key_lengths", problem.mask.key_lengths},
                    {"mask.allowed", problem.mask.allowed},
                    {"mask.bias", problem.mask.bias},
                    {"dropout.state", problem.dropout.state},
                    {"sinks", problem.sinks},
                    {"block_table", problem.block_table},
                    {"value_sums", problem.value_sums}};
  if (problem.packed) {
    operands.add({"packed.cu_q", problem.packed->cu_q});
    operands.add({"packed.cu_k", problem.packed->cu_k});
  }
  return operands;
}

void check_overlaps(Report& report, const Operands& written, const Operands& read, const Execution& run) {
  const auto outputs = written.all(), inputs = read.all();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (const auto& input : inputs)
      check_apart(report, outputs[i].argument, outputs[i].view, input.argument, input.view);
    for (std::size_t j = i + 1; j < outputs.size(); ++j) {
      check_apart(report, outputs[i].argument, outputs[i].view, outputs[j].argument, outputs[j].view);
    }
  }
  if (run.workspace == nullptr || run.workspace_bytes == 0) return;
  const ConstTensorView workspace(run.workspace, DType::b8, {static_cast<std::int64_t>(run.workspace_bytes)});
  for (const auto& operands : {outputs, inputs}) {
    for (const auto& operand : operands) check_apart(report, "workspace", workspace, operand.argument, operand.view);
  }
}

// Shape and type of a tensor whose shape follows from q, k, v: `dtype`, or fp32. `rank` extents of `expected` count.
void check_shaped(Report& report, std::string_view argument, const ConstTensorView& view, const char* layout, int rank,
                  std::array<std::int64_t, 4> expected, DType dtype, bool written) {
  const Inner inner = rank == 4 ? Inner::contiguous : Inner::any;
  const bool shape_ok = written ? check_output(report, argument, view, layout, rank, inner)
                                : check_input(report, argument, view, layout, rank, inner);
  if (view.dtype != dtype && view.dtype != DType::f32) {
    report.add(std::string(argument) + ".dtype",
               (dtype == DType::f32 ? "" : std::string(name(dtype)) + " or ") + "fp32", std::string(name(view.dtype)));
  }
  if (!shape_ok) return;
  ConstTensorView wanted = view;
  wanted.shape = expected;
  for (int dim = 0; dim < rank; ++dim) {
    if (view.extent(dim) != wanted.extent(dim)) {
      report.add(std::string(argument) + ".shape", std::string(layout) + " = " + shape_text(wanted), shape_text(view));
      return;
    }
  }
}

void check_mask_gradient(Report& report, const BackwardArgs& args) {
  const ConstTensorView& bias = args.problem.mask.bias;
  if (!given(args.d_bias)) return;
  if (!given(bias)) {
    report.add("d_bias", "none without a bias", "one");
  } else if (bias.rank == 4) {
    check_shaped(report, "d_bias", args.d_bias, "mask.bias.shape", 4, bias.shape, bias.dtype, true);
  }
}

bool has_shapes(const Problem& problem) { return problem.q.rank == 4 && problem.k.rank == 4 && problem.v.rank == 4; }

}  // namespace

std::vector<std::string> problem_reasons(const Problem& problem) {
  Report report;
  check_problem(report, problem);
  return report.reasons;
}

std::vector<std::string> length_reasons(const Problem& problem) {
  Report report;
  check_lengths(report, problem);
  return report.reasons;
}

std::vector<std::string> forward_reasons(const ForwardArgs& args) {
  Report report;
  const Problem& problem = args.problem;
  check_problem(report, problem);
  if (has_shapes(problem)) {
    const ConstTensorView& q = problem.q;
    check_shaped(report, "out", args.out, "[batch, heads, n_q, d_v]", 4,
                 {q.extent(0), q.extent(1), q.extent(2), problem.v.extent(3)}, q.dtype, true);
    if (given(args.lse)) {
      check_shaped(report, "lse", args.lse, "[batch, heads, n_q]", 3, {q.extent(0), q.extent(1), q.extent(2), 0},
                   DType::f32, true);
    }
  }
  check_execution(report, problem, args.run);
  if (report.reasons.empty()) {
    check_overlaps(report, {{"out", args.out}, {"lse", args.lse}}, problem_operands(problem), args.run);
  }
  return report.reasons;
}

std::vector<std::string> backward_reasons(const BackwardArgs& args) {
  Report report;
  const Problem& problem = args.problem;
  check_problem(report, problem);
  if (has_shapes(problem)) {
    const ConstTensorView& q = problem.q;
    const ConstTensorView& k = problem.k;
    const ConstTensorView& v = problem.v;
    const std::array<std::int64_t, 4> out_shape{q.extent(0), q.extent(1), q.extent(2), v.extent(3)};
    check_shaped(report, "out", args.out, "[batch, heads, n_q, d_v]", 4, out_shape, q.dtype, false);
    check_shaped(report, "lse", args.lse, "[batch, heads, n_q]", 3, {q.extent(0), q.extent(1), q.extent(2), 0},
                 DType::f32, false);
    check_shaped(report, "d_out", args.d_out, "[batch, heads, n_q, d_v]", 4, out_shape, q.dtype, false);
    check_shaped(report, "d_q", args.d_q, "[batch, heads, n_q, d]", 4, q.shape, q.dtype, true);
    check_shaped(report, "d_k", args.d_k, "[batch, kv_heads, n_k, d]", 4, k.shape, q.dtype, true);
    check_shaped(report, "d_v", args.d_v, "[batch, kv_heads, n_k, d_v]", 4, v.shape, q.dtype, true);
    if (given(args.d_lse)) {
      check_shaped(report, "d_lse", args.d_lse, "[batch, heads, n_q]", 3, {q.extent(0), q.extent(1), q.extent(2), 0},
                   DType::f32, false);
    }
    check_mask_gradient(report, args);
    if (given(args.d_sinks)) {
      if (!given(problem.sinks)) report.add("d_sinks", "none without sinks", "one");
      check_shaped(report, "d_sinks", args.d_sinks, "[heads]", 1, {q.extent(1), 0, 0, 0}, DType::f32, true);
    }
  }
  if (problem.rest == Rest::mean) report.add("rest", "drop for gradients (mean has none)", "mean");
  if (given(problem.block_table)) report.add("block_table", "none for gradients (pages are for inference)", "one");
  check_execution(report, problem, args.run);
  if (report.reasons.empty()) {
    Operands inputs = problem_operands(problem);
    inputs.add({"out", args.out});
    inputs.add({"lse", args.lse});
    inputs.add({"d_out", args.d_out});
    inputs.add({"d_lse", args.d_lse});
    check_overlaps(
        report,
        {{"d_q", args.d_q}, {"d_k", args.d_k}, {"d_v", args.d_v}, {"d_bias", args.d_bias}, {"d_sinks", args.d_sinks}},
        inputs, args.run);
  }
  return report.reasons;
}

void raise_if_any(std::vector<std::string> reasons) {
  if (!reasons.empty()) throw Error(std::move(reasons));
}

}  // namespace dspattn::core
