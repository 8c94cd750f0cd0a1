// dspattn kernels: the kernel table; with a shape, which kernel would serve, and why the others would not.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iomanip>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "apps/commands.h"
#include "apps/parser.h"
#include "apps/problem_options.h"
#include "dspattn/kernels.h"

namespace dspattn::apps {
namespace {

struct KernelsOptions {
  RuleOptions rule;
  ShapeOptions shape;
  std::string dtype = "fp32";
  std::string device = "cpu";
  bool backward = false;
  bool with_lengths = false;
  bool with_allowed = false;
  bool with_bias = false;
  bool all = false;
};

// Stands for a tensor that is never read: the table is asked about shapes, not about values. Sixteen-byte aligned, and
// far from the next one.
void* stand_in(int index) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 45) + (static_cast<std::uintptr_t>(index) << 40));
}

void list_table() {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const std::vector<KernelInfo> infos = kernels(pass);
    std::cout << (pass == Pass::forward ? "forward" : "\nbackward") << ", in order of preference\n";
    std::size_t width = 0;
    for (const KernelInfo& info : infos) width = std::max(width, info.name.size());
    for (const KernelInfo& info : infos) {
      std::cout << "  " << std::left << std::setw(static_cast<int>(width)) << info.name << "  "
                << (info.device == DeviceType::cpu ? "cpu " : "cuda") << "  " << info.summary << "\n";
    }
    if (infos.empty()) std::cout << "  none in this build\n";
  }
}

// Strides are products of sizes: with larger ones they would overflow.
void require_countable(const ShapeOptions& shape) {
  const Sizes sizes = {{"batch", shape.batch},    {"heads", shape.heads}, {"kv-heads", shape.key_heads()},
                       {"n-q", shape.queries()},  {"n-k", shape.keys()},  {"d", shape.d},
                       {"d-v", shape.value_dim()}};
  const auto elements = [&](std::initializer_list<std::size_t> factors) {
    double product = 1;
    for (const std::size_t i : factors) product *= std::fabs(static_cast<double>(sizes[i].second));
    return product;
  };
  const double most = std::max({elements({0, 1, 3, 5}), elements({0, 2, 4, 5}), elements({0, 2, 4, 6})});
  if (most >= 0x1p60) throw too_large(sizes, "tensors of less than 2^60 elements");
}

// The problem that the options describe. `lengths` holds what its key lengths point to.
Problem problem_of(const KernelsOptions& options, std::vector<std::int32_t>& lengths) {
  const ShapeOptions& shape = options.shape;
  require_countable(shape);
  const DType dtype = parse_dtype(options.dtype);
  Problem problem;
  options.rule.apply(problem);
  problem.device = parse_device(options.device);
  problem.q = {stand_in(0), dtype, {shape.batch, shape.heads, shape.queries(), shape.d}};
  problem.k = {stand_in(1), dtype, {shape.batch, shape.key_heads(), shape.keys(), shape.d}};
  problem.v = {stand_in(2), dtype, {shape.batch, shape.key_heads(), shape.keys(), shape.value_dim()}};
  // Lengths of a CPU problem are looked at, so these are real.
  constexpr std::int64_t kMaxBatch = 1 << 20;
  if (options.with_lengths) {
    lengths.resize(static_cast<std::size_t>(std::clamp(shape.batch, std::int64_t{0}, kMaxBatch)));
    problem.mask.key_lengths = {lengths.data(), DType::i32, {std::ssize(lengths)}};
  }
  if (options.with_allowed) problem.mask.allowed = {stand_in(3), DType::b8, {1, 1, shape.queries(), shape.keys()}};
  if (options.with_bias) problem.mask.bias = {stand_in(4), DType::f32, {1, 1, shape.queries(), shape.keys()}};
  return problem;
}

bool serves(const Verdict& verdict) { return verdict.reasons.empty(); }

void print_refusal(const Verdict& verdict, const Command& command) {
  std::cout << verdict.kernel.name << ": cannot\n";
  for (const std::string& reason : command.with_option_names(verdict.reasons)) std::cout << "    " << reason << "\n";
}

// Those of the device asked for that refuse for the fewest reasons: what to change to be served.
std::vector<Verdict> nearest(const std::vector<Verdict>& verdicts, DeviceType device) {
  std::vector<Verdict> found;
  for (const Verdict& verdict : verdicts) {
    if (verdict.kernel.device != device) continue;
    if (!found.empty() && verdict.reasons.size() < found.front().reasons.size()) found.clear();
    if (found.empty() || verdict.reasons.size() == found.front().reasons.size()) found.push_back(verdict);
  }
  return found;
}

// The answer first, then what else there is; whether any kernel serves.
bool print_answer(const Problem& problem, const std::vector<Verdict>& verdicts, bool all, const Command& command) {
  auto served =
      std::ranges::find_if(verdicts, [](const Verdict& verdict) { return serves(verdict) && !verdict.yields; });
  if (served == verdicts.end()) served = std::ranges::find_if(verdicts, serves);
  const auto others = std::ranges::count_if(verdicts, [](const Verdict& verdict) { return !serves(verdict); });
  if (served != verdicts.end()) {
    std::cout << "would serve: " << served->kernel.name << "\n";
    std::istringstream lines(plan(problem, served->kernel.pass, served->kernel.name));
    for (std::string line; std::getline(lines, line);) std::cout << "    " << line << "\n";
    for (auto verdict = verdicts.begin(); verdict != verdicts.end(); ++verdict) {
      if (serves(*verdict) && verdict != served) std::cout << "could serve too: " << verdict->kernel.name << "\n";
    }
  } else {
    std::cout << "No kernel of this build serves the problem.\n";
    if (!all) {
      for (const Verdict& verdict : nearest(verdicts, problem.device.type)) print_refusal(verdict, command);
    }
  }
  if (all) {
    for (const Verdict& verdict : verdicts) {
      if (!serves(verdict)) print_refusal(verdict, command);
    }
  } else if (others > 0) {
    std::cout << others << (others == 1 ? " kernel" : " kernels") << " of the table cannot serve (--all says why)\n";
  }
  return served != verdicts.end();
}

}  // namespace

void register_kernels(Parser& parser, Outcome& outcome) {
  Command command = parser.add_subcommand(
      "kernels", "The table of kernels; with a shape, which one would serve, and why the others would not");
  auto options = std::make_shared<KernelsOptions>();
  std::vector<Option> asked = options->shape.add_to(command);
  options->rule.add_to(command);
  asked.push_back(command.add_option("--dtype", options->dtype, "fp32, fp16 or bf16").capture_default_str());
  asked.push_back(command.add_option("--device", options->device, "cpu, cuda or cuda:<index>").capture_default_str());
  asked.push_back(command.add_flag("--backward", options->backward, "ask about the gradients instead of the forward"));
  asked.push_back(command.add_flag("--key-lengths", options->with_lengths, "with a length per sequence"));
  asked.push_back(command.add_flag("--mask", options->with_allowed, "with a boolean mask tensor"));
  asked.push_back(command.add_flag("--bias", options->with_bias, "with an additive bias tensor"));
  for (const char* name : {"--pattern", "--grouping", "--rest", "--selection", "--causal", "--top-left", "--offset",
                           "--window-left", "--window-right", "--scale"}) {
    asked.push_back(command.get_option(name));
  }
  command.add_flag("--all", options->all, "with a shape: every kernel that cannot serve, and every reason");
  command.footer(R"(
Examples:
  dspattn kernels                                    the whole table
  dspattn kernels --n 4096 --d 64 --dtype bf16       who serves this shape
  dspattn kernels --n 4096 --d 64 --dtype bf16 --all and why the others do not
Exit code 1 when no kernel serves the problem.)");
  command.callback([options, asked, command, &outcome] {
    if (std::ranges::none_of(asked, [](const Option& option) { return option.given(); })) {
      list_table();
      return;
    }
    std::vector<std::int32_t> lengths;
    const Problem problem = problem_of(*options, lengths);
    const std::vector<Verdict> verdicts = consider(problem, options->backward ? Pass::backward : Pass::forward);
    if (!print_answer(problem, verdicts, options->all, command)) outcome.exit = Exit::check_failed;
  });
}

}  // namespace dspattn::apps
