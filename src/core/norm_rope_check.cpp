#include "core/norm_rope_check.h"

#include <cmath>
#include <string_view>

#include "core/tensor_checks.h"

namespace dspattn::core {
namespace {

constexpr const char* kLayout = "[batch, n, heads, d]";
constexpr std::int64_t kMostRows = std::int64_t{1} << 29;  // tokens, or heads, of a part

std::string part_name(std::size_t index) { return "parts[" + std::to_string(index) + "]"; }

void check_run_and_eps(Report& report, const NormRopeArgs& args) {
  const bool cpu = args.device.type == DeviceType::cpu;
  if (args.device.index < 0 || (cpu && args.device.index != 0)) {
    report.add("device.index", cpu ? "0 for the CPU" : ">= 0", std::to_string(args.device.index));
  }
  if (cpu && args.run.stream != nullptr) report.add("stream", "null for CPU tensors", hex(args.run.stream));
  if (args.run.threads < 0) report.add("threads", ">= 0", std::to_string(args.run.threads));
  if (args.eps && !(std::isfinite(*args.eps) && *args.eps >= 0)) {
    report.add("eps", "a finite number >= 0", std::to_string(*args.eps));
  }
}

// Of the part alone and beside the first one. Returns whether x, out and weight may be compared with others.
bool check_part(Report& report, const NormRopeArgs& args, std::size_t index) {
  const NormRopePart& part = args.parts[index];
  const ConstTensorView& first = args.parts.front().x;
  const std::string x = part_name(index) + ".x", out = part_name(index) + ".out", weight = part_name(index) + ".weight";
  const bool x_ok = check_input(report, x, part.x, kLayout, 4, Inner::contiguous);
  if (!is_floating(part.x.dtype)) report.add(x + ".dtype", "fp32, fp16 or bf16", std::string(name(part.x.dtype)));
  if (!x_ok) return false;
  if (part.x.extent(3) > kMaxNormRopeDim) {
    report.add(x + ".shape[3]", "a head dimension up to " + std::to_string(kMaxNormRopeDim),
               std::to_string(part.x.extent(3)));
  }
  for (const int dim : {1, 2}) {
    if (part.x.extent(dim) > kMostRows) {
      report.add(x + ".shape[" + std::to_string(dim) + "]", "at most 2^29", std::to_string(part.x.extent(dim)));
    }
  }
  if (first.rank == 4) {
    for (const int dim : {0, 3}) {
      if (part.x.extent(dim) == first.extent(dim)) continue;
      report.add(x + ".shape[" + std::to_string(dim) + "]", std::to_string(first.extent(dim)) + " as parts[0].x has",
                 std::to_string(part.x.extent(dim)));
    }
  }
  if (part.x.dtype != first.dtype) {
    report.add(x + ".dtype", std::string(name(first.dtype)) + " as parts[0].x has", std::string(name(part.x.dtype)));
  }
  const bool out_ok = check_output(report, out, part.out, kLayout, 4, Inner::contiguous);
  if (out_ok && part.out.shape != part.x.shape) report.add(out + ".shape", shape_text(part.x), shape_text(part.out));
  if (part.out.dtype != part.x.dtype) {
    report.add(out + ".dtype", std::string(name(part.x.dtype)) + " as x has", std::string(name(part.out.dtype)));
  }
  if (!given(part.weight)) return out_ok;
  if (!args.eps) report.add(weight, "none without eps", "one");
  const bool weight_ok = check_input(report, weight, part.weight, "[d]", 1, Inner::contiguous);
  if (weight_ok && part.weight.extent(0) != part.x.extent(3)) {
    report.add(weight + ".shape[0]", "d = " + std::to_string(part.x.extent(3)), std::to_string(part.weight.extent(0)));
  }
  if (part.weight.dtype != part.x.dtype) {
    report.add(weight + ".dtype", std::string(name(part.x.dtype)) + " as x has", std::string(name(part.weight.dtype)));
  }
  return out_ok && weight_ok;
}

// cos or sin beside the parts.
bool check_angles(Report& report, const NormRopeArgs& args, std::string_view argument, const ConstTensorView& view) {
  if (view.dtype != DType::f32) report.add(std::string(argument) + ".dtype", "fp32", std::string(name(view.dtype)));
  if (!check_input(report, argument, view, "[positions, d]", 2, Inner::contiguous)) return false;
  for (std::size_t i = 0; i < args.parts.size(); ++i) {
    const NormRopePart& part = args.parts[i];
    if (part.x.rank != 4) continue;
    if (view.extent(1) != part.x.extent(3)) {
      report.add(std::string(argument) + ".shape[1]", "d = " + std::to_string(part.x.extent(3)),
                 std::to_string(view.extent(1)));
    }
    if (part.first_position < 0) {
      report.add(part_name(i) + ".first_position", ">= 0", std::to_string(part.first_position));
    } else if (part.x.extent(1) > 0 && part.first_position > view.extent(0) - part.x.extent(1)) {
      report.add(std::string(argument) + ".shape[0]",
                 "a row for each position of " + part_name(i) + ", from " + std::to_string(part.first_position) +
                     " on " + std::to_string(part.x.extent(1)),
                 std::to_string(view.extent(0)));
    }
  }
  return true;
}

void check_outputs_apart(Report& report, const NormRopeArgs& args) {
  for (std::size_t i = 0; i < args.parts.size(); ++i) {
    const std::string out = part_name(i) + ".out";
    const ConstTensorView written = args.parts[i].out;
    for (std::size_t j = 0; j < args.parts.size(); ++j) {
      check_apart(report, out, written, part_name(j) + ".x", args.parts[j].x);
      check_apart(report, out, written, part_name(j) + ".weight", args.parts[j].weight);
      if (j < i) check_apart(report, out, written, part_name(j) + ".out", args.parts[j].out);
    }
    check_apart(report, out, written, "cos", args.cos);
    check_apart(report, out, written, "sin", args.sin);
  }
}

}  // namespace

std::vector<std::string> norm_rope_reasons(const NormRopeArgs& args) {
  Report report;
  check_run_and_eps(report, args);
  if (args.parts.size() > kMaxNormRopeParts) {
    report.add("parts", "at most " + std::to_string(kMaxNormRopeParts), std::to_string(args.parts.size()));
    return report.reasons;
  }
  bool comparable = true;
  for (std::size_t i = 0; i < args.parts.size(); ++i) comparable = check_part(report, args, i) && comparable;
  if (given(args.cos) != given(args.sin)) {
    report.add(given(args.cos) ? "sin" : "cos", "both of cos and sin, or neither", "none");
  } else if (given(args.cos)) {
    comparable = check_angles(report, args, "cos", args.cos) && comparable;
    comparable = check_angles(report, args, "sin", args.sin) && comparable;
    if (!args.parts.empty() && args.parts.front().x.rank == 4 && args.parts.front().x.extent(3) % 2 != 0) {
      report.add("parts[0].x.shape[3]", "an even head dimension, for rotation",
                 std::to_string(args.parts.front().x.extent(3)));
    }
  }
  if (comparable && report.reasons.empty()) check_outputs_apart(report, args);
  return report.reasons;
}

}  // namespace dspattn::core
