#include "check/check.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>

#include "api/device_memory.h"
#include "check/assignment.h"
#include "check/case_data.h"
#include "check/judge.h"
#include "check/selection.h"
#include "check/tolerance.h"
#include "core/half.h"
#include "cpu/reference.h"
#include "dspattn/error.h"

namespace dspattn::check {
namespace {

struct ForwardResult {
  Tensor out, lse;
};

struct BackwardResult {
  Tensor d_q, d_k, d_v, d_bias, d_sinks;

  std::vector<std::pair<const char*, Tensor*>> all() {
    return {{"d_q", &d_q}, {"d_k", &d_k}, {"d_v", &d_v}, {"d_bias", &d_bias}, {"d_sinks", &d_sinks}};
  }
};

ForwardResult run_forward(const CaseData& data, const Runner& runner, int threads, Rest rest) {
  ForwardResult result{data.output_like_q(data.drawn().d_v), {}};
  ForwardArgs args;
  args.problem = data.device_problem();
  args.problem.rest = rest;
  if (rest == Rest::drop) args.problem.value_sums = {};
  args.out = result.out.device_view();
  args.run.threads = threads;
  if (data.drawn().want_lse) {
    result.lse = data.lse_output();
    args.lse = result.lse.device_view();
  }
  runner.forward(args);
  result.out.download();
  if (result.lse.present()) result.lse.download();
  return result;
}

ForwardResult run_forward(const CaseData& data, const Runner& runner, int threads) {
  return run_forward(data, runner, threads, data.drawn().rest);
}

BackwardResult run_backward(const CaseData& data, const Runner& runner, const ForwardResult& forward, int threads) {
  const Case& drawn = data.drawn();
  BackwardResult result{
      data.output_like_q(drawn.d), data.output_like_k(drawn.d), data.output_like_k(drawn.d_v), {}, {}};
  if (drawn.d_bias) result.d_bias = data.d_bias_output();
  if (drawn.d_sinks) result.d_sinks = data.d_sinks_output();
  BackwardArgs args;
  args.problem = data.device_problem();
  args.out = forward.out.device_view();
  args.lse = forward.lse.device_view();
  args.d_out = data.d_out().device_view();
  args.d_q = result.d_q.device_view();
  args.d_k = result.d_k.device_view();
  args.d_v = result.d_v.device_view();
  if (drawn.d_lse) args.d_lse = data.d_lse().device_view();
  if (drawn.d_bias) args.d_bias = result.d_bias.device_view();
  if (drawn.d_sinks) args.d_sinks = result.d_sinks.device_view();
  args.run.threads = threads;
  runner.backward(args);
  for (const auto& [name, tensor] : result.all()) {
    if (tensor->present()) tensor->download();
  }
  return result;
}

// An LSE beyond fp32 is its largest number.
std::vector<double> within_fp32(std::vector<double> lse) {
  const double largest = core::largest_of(DType::f32);
  for (double& value : lse) {
    if (std::isfinite(value)) value = std::clamp(value, -largest, largest);
  }
  return lse;
}

std::int64_t longest_keys(const CaseData& data) {
  std::int64_t longest = 0;
  for (const cpu::Sequence& seq : cpu::sequences_of(data.host_problem())) longest = std::max(longest, seq.n_k);
  return longest;
}

// The kernel's selection by probing with V of its own width, or of a larger one where that takes too many calls.
cpu::Selection kernel_selection(const CaseData& data, const Runner& runner) {
  constexpr std::int64_t kCallsAtMost = 4;
  const std::int64_t keys = longest_keys(data);
  const std::int64_t own = data.drawn().d_v;
  if (own * kCallsAtMost < keys) {
    constexpr std::int64_t kWidest = 256;  // that the kernels for common head dims take
    const std::int64_t wide = std::min(kWidest, (keys + 15) / 16 * 16);
    try {
      return probe_selection(data, runner, wide, keys);
    } catch (const Error&) {
      // The kernel takes no other d_v than this one.
    }
  }
  return probe_selection(data, runner, own, keys);
}

// Rows that prune nothing have no rest: whatever becomes of it, they have the same bits. Not on a GPU, where the
// kernels for the mean may have other tiles and exponentials than those for the drop.
void compare_with_drop(const CaseData& data, const Runner& runner, const ForwardResult& forward,
                       const cpu::Reference& given, CaseReport& report) {
  const ForwardResult dropped = run_forward(data, runner, 0, Rest::drop);
  const std::int64_t heads = forward.out.host_view().extent(1);
  const std::int64_t rows = forward.out.host_view().extent(2);
  const auto same = [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  for (const cpu::Sequence& seq : cpu::sequences_of(data.host_problem())) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = seq.q_begin; i < seq.q_begin + seq.n_q; ++i) {
        const std::int64_t row = (seq.batch * heads + h) * rows + i;
        bool alike = true;
        for (std::int64_t j = 0; j < seq.n_k && alike; ++j) {
          alike =
              given.selection.at(row, j) != 0 || given.scores.at(row, j) == -std::numeric_limits<double>::infinity();
        }
        if (!alike) continue;
        for (std::int64_t c = 0; c < data.drawn().d_v && alike; ++c) {
          alike = same(forward.out.at(seq.batch, h, i, c), dropped.out.at(seq.batch, h, i, c));
        }
        if (forward.lse.present()) {
          alike = alike && same(forward.lse.at(seq.batch, h, i, 0), dropped.lse.at(seq.batch, h, i, 0));
        }
        if (alike) continue;
        report.failures.push_back("rest: row " + std::to_string(row) + " prunes nothing, yet mean and drop differ");
        return;
      }
    }
  }
}

void check_repeats(const CaseData& data, const Runner& runner, const ForwardResult& forward, BackwardResult* backward,
                   int reruns, Judge& judge) {
  const bool on_cpu = data.device_problem().device.type == DeviceType::cpu;
  std::vector<int> runs(static_cast<std::size_t>(reruns), 0);
  if (on_cpu && reruns > 0) runs = {1, 2, 5};
  for (const int threads : runs) {
    const std::string how = on_cpu ? "running with " + std::to_string(threads) + " threads" : "running again";
    if (backward == nullptr) {
      const ForwardResult again = run_forward(data, runner, threads);
      judge.same_bits("out", forward.out, again.out, how);
      judge.same_bits("lse", forward.lse, again.lse, how);
    } else {
      BackwardResult again = run_backward(data, runner, forward, threads);
      const auto first = backward->all(), second = again.all();
      for (std::size_t i = 0; i < first.size(); ++i) {
        judge.same_bits(first[i].first, *first[i].second, *second[i].second, how);
      }
    }
  }
}

// The library's CPU kernel on the same problem. Where both select the same keys, the two results may differ by what the
// kernel may from the oracle, and the CPU's own rounding of its result.
void compare_with_cpu(const CaseData& data, const ForwardResult& forward, const cpu::Selection& selection,
                      const ForwardTolerance& tolerance, CaseReport& report) {
  const Case& drawn = data.drawn();
  Case in_one_piece = drawn;  // the CPU has no pages
  in_one_piece.page = 0;
  const CaseData on_cpu(in_one_piece, {}, core::host_memory());
  Runner runner = library_runner(core::host_memory(), {}, {});
  runner.forward = [call = runner.forward](const ForwardArgs& given) {
    ForwardArgs args = given;
    args.run.threads = 1;  // many cases are checked side by side
    call(args);
  };
  const ForwardResult expected = run_forward(on_cpu, runner, 1);
  const cpu::Selection selected = kernel_selection(on_cpu, runner);
  const std::int64_t heads = forward.out.host_view().extent(1);
  const std::int64_t rows = forward.out.host_view().extent(2);
  for (const cpu::Sequence& seq : cpu::sequences_of(data.host_problem())) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = seq.q_begin; i < seq.q_begin + seq.n_q; ++i) {
        const std::int64_t row = (seq.batch * heads + h) * rows + i;
        bool alike = true;
        for (std::int64_t j = 0; j < seq.n_k && alike; ++j) alike = selection.at(row, j) == selected.at(row, j);
        if (!alike) continue;
        ++report.rows_beside_cpu;
        for (std::int64_t c = 0; c < drawn.d_v; ++c) {
          const double ours = forward.out.at(seq.batch, h, i, c);
          const double theirs = expected.out.at(seq.batch, h, i, c);
          const double allowed = tolerance.out[static_cast<std::size_t>(row * drawn.d_v + c)] +
                                 core::epsilon_of(drawn.dtype) * std::abs(theirs);
          if (std::isnan(ours) ? std::isnan(theirs) : std::abs(ours - theirs) <= allowed) continue;
          report.failures.push_back("out beside the CPU's, row " + std::to_string(row) + " column " +
                                    std::to_string(c) + ": " + number(ours) + " and " + number(theirs) + ", allowed " +
                                    number(allowed));
          return;
        }
      }
    }
  }
}

void check_data(const CaseData& data, const Runner& runner, const CheckOptions& options, CaseReport& report) {
  const Case& drawn = data.drawn();
  const Problem& host = data.host_problem();
  Judge judge(data, report);
  const ForwardResult forward = run_forward(data, runner, 0);
  const cpu::Reference oracle = cpu::reference_forward(host);
  SelectionJudgement selection = judge_selection(data, oracle, kernel_selection(data, runner));
  report.near_ties = selection.near_ties;
  report.failures.insert(report.failures.end(), selection.failures.begin(), selection.failures.end());

  const bool same_choice = selection.selection.values == oracle.selection.values;
  const cpu::Reference given = same_choice ? oracle : cpu::reference_forward(host, &selection.selection);
  const ForwardTolerance tolerance = forward_tolerance(data, given);
  judge.compare("out", forward.out, Side::queries, drawn.d_v, given.out, tolerance.out);
  if (drawn.want_lse) judge.compare("lse", forward.lse, Side::queries, 1, within_fp32(given.lse), tolerance.lse);
  if (drawn.pass == Pass::forward) {
    const bool on_cpu = data.device_problem().device.type == DeviceType::cpu;
    if (drawn.rest == Rest::mean && on_cpu) compare_with_drop(data, runner, forward, given, report);
    if (options.beside_cpu) compare_with_cpu(data, forward, selection.selection, tolerance, report);
    check_repeats(data, runner, forward, nullptr, options.reruns, judge);
    return;
  }

  BackwardResult backward = run_backward(data, runner, forward, 0);
  const ConstTensorView d_lse = drawn.d_lse ? data.d_lse().host_view() : ConstTensorView();
  const cpu::Gradients gradients = cpu::reference_backward(host, data.d_out().host_view(), &given.selection, d_lse);
  const BackwardTolerance allowed = backward_tolerance(data, given, gradients, tolerance);
  judge.compare("d_q", backward.d_q, Side::queries, drawn.d, gradients.d_q, allowed.d_q);
  judge.compare("d_k", backward.d_k, Side::keys, drawn.d, gradients.d_k, allowed.d_k);
  judge.compare("d_v", backward.d_v, Side::keys, drawn.d_v, gradients.d_v, allowed.d_v);
  if (drawn.d_bias) judge.compare_all("d_bias", backward.d_bias, gradients.d_bias, allowed.d_bias);
  if (drawn.d_sinks) judge.compare_all("d_sinks", backward.d_sinks, gradients.d_sinks, allowed.d_sinks);
  check_repeats(data, runner, forward, &backward, options.reruns, judge);
}

}  // namespace

CaseReport check_drawn(const Case& drawn, const Runner& runner, const CheckOptions& options) {
  CaseReport report;
  report.description = describe(drawn);
  try {
    const CaseData data(drawn, options.device, api::memory_of(options.device));
    check_data(data, runner, options, report);
  } catch (const std::exception& error) {
    report.failures.push_back(std::string("raised: ") + error.what());
  }
  return report;
}

CaseReport check_case(std::uint64_t seed, std::int64_t index, const std::string& kernel, const CheckOptions& options) {
  CheckOptions resolved = options;
  if (!kernel.empty()) {
    const bool has_forward = has_kernel(Pass::forward, kernel);
    const bool has_backward = has_kernel(Pass::backward, kernel);
    if (!has_forward && !has_backward)
      throw Error("kernel: expected a name of the kernel table, got \"" + kernel + "\"");
    if (!has_forward) resolved.limits.pass = Pass::backward;
    if (!has_backward) resolved.limits.pass = Pass::forward;
  }
  Case drawn = restricted(draw_case(seed, index, resolved.limits), kernel, options.device.type);
  Assignment assigned = assign(drawn, kernel, options.device);
  if (!assigned.reasons.empty()) {
    // Each of its features is served by some kernel, but all of them together by none.
    drawn = drawn.restricted_to({});
    assigned = assign(drawn, kernel, options.device);
  }
  core::DeviceMemory& memory = api::memory_of(options.device);
  CaseReport report;
  report.description = describe(drawn);
  report.reasons = assigned.reasons;
  report.kernel = assigned.kernel;
  if (report.reasons.empty()) {
    const std::string ran = report.kernel;
    report = check_drawn(drawn, library_runner(memory, assigned.forward_kernel, kernel), resolved);
    report.kernel = ran;
  } else {
    report.served = false;
  }
  report.command = command_line(seed, index, kernel, options);
  return report;
}

std::string command_line(std::uint64_t seed, std::int64_t index, const std::string& kernel,
                         const CheckOptions& options) {
  std::string text = "dspattn verify --seed " + std::to_string(seed) + " --case " + std::to_string(index);
  if (!kernel.empty()) text += " --kernel " + kernel;
  if (options.device.type == DeviceType::cuda) text += " --device cuda:" + std::to_string(options.device.index);
  const DrawLimits& limits = options.limits;
  if (limits.pass) text += *limits.pass == Pass::forward ? " --pass forward" : " --pass backward";
  if (limits.dtype) text += " --dtype " + std::string(name(*limits.dtype));
  if (limits.pattern) text += " --pattern " + to_string(*limits.pattern);
  if (limits.grouping) text += " --grouping " + to_string(*limits.grouping);
  if (limits.head_dim) text += " --head-dim " + std::to_string(*limits.head_dim);
  if (limits.choice) text += *limits.choice == Choice::shared ? " --selection shared" : " --selection own";
  if (limits.rest) text += *limits.rest == Rest::mean ? " --rest mean" : " --rest drop";
  const DrawLimits defaults;
  if (limits.max_n != defaults.max_n) text += " --max-n " + std::to_string(limits.max_n);
  if (limits.max_queries) text += " --max-queries " + std::to_string(*limits.max_queries);
  if (limits.max_work != defaults.max_work) text += " --max-work " + std::to_string(limits.max_work);
  return text;
}

}  // namespace dspattn::check
