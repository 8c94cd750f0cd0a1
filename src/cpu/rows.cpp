#include "cpu/rows.h"

#include <string>

#include "cpu/backward.h"
#include "cpu/forward.h"
#include "cpu/reference.h"
#include "cpu/tile.h"

namespace dspattn::cpu {
namespace {

using core::KernelRow;
using core::Refusals;

void serves_everything(const Problem&, Refusals&) {}

// The reasons of a kernel made for one pattern.
void unless_pattern(const Problem& problem, Refusals& refusals, bool fits, const char* takes) {
  if (fits) return;
  refusals.add(
      [&] { return std::string("pattern: this kernel takes ") + takes + ", got " + to_string(problem.pattern); });
}

void unless_2_4(const Problem& problem, Refusals& refusals) {
  unless_pattern(problem, refusals, problem.pattern == Pattern{2, 4}, "2:4");
}
void unless_1_2(const Problem& problem, Refusals& refusals) {
  unless_pattern(problem, refusals, problem.pattern == Pattern{1, 2}, "1:2");
}
void unless_dense(const Problem& problem, Refusals& refusals) {
  unless_pattern(problem, refusals, problem.pattern.is_dense(), "dense");
}

// Heads that choose together are rows of one tile.
void unless_shared_fits(const Problem& problem, Refusals& refusals) {
  if (problem.choice != dspattn::Choice::shared || problem.pattern.is_dense() || problem.k.extent(1) == 0) return;
  const std::int64_t group_heads = problem.q.extent(1) / problem.k.extent(1);
  if (group_heads > kTileQ) {
    refusals.add([&] {
      return "choice: this kernel takes shared with at most " + std::to_string(kTileQ) +
             " query heads for each key head, got " + std::to_string(group_heads);
    });
  }
}

// Working memory is a fixed amount per thread and not the caller's concern.
std::size_t no_forward_workspace(const ForwardArgs&) { return 0; }
std::size_t no_backward_workspace(const BackwardArgs&) { return 0; }

constexpr core::Features kFeatures{core::Feature::fp32_results, core::Feature::rest_mean, core::Feature::dropout,
                                   core::Feature::soft_cap, core::Feature::sinks};
constexpr core::Features kBackwardFeatures{core::Feature::fp32_results, core::Feature::dropout, core::Feature::soft_cap,
                                           core::Feature::sinks,        core::Feature::d_lse,   core::Feature::d_bias,
                                           core::Feature::d_sinks};

// Rows that prune by any choice, and those that prune nothing.
constexpr core::Features kAnyChoice{core::Feature::fp32_results, core::Feature::rest_mean,
                                    core::Feature::dropout,      core::Feature::soft_cap,
                                    core::Feature::sinks,        core::Feature::shared_choice};

KernelRow forward_row(std::string_view name, std::string_view summary, void (*why_not)(const Problem&, Refusals&),
                      void (*launch)(const ForwardArgs&), core::Features features) {
  return {.info = {name, Pass::forward, DeviceType::cpu, summary},
          .why_not = why_not,
          .forward_workspace = no_forward_workspace,
          .forward = launch,
          .features = features};
}

KernelRow backward_row(std::string_view name, std::string_view summary, void (*why_not)(const Problem&, Refusals&),
                       void (*launch)(const BackwardArgs&)) {
  return {.info = {name, Pass::backward, DeviceType::cpu, summary},
          .why_not = why_not,
          .backward_workspace = no_backward_workspace,
          .backward = launch,
          .features = kBackwardFeatures};
}

constexpr const char* kSummary2To4 = "AVX-512, AVX2 or NEON, threads: 2:4, any type, mask and head dim";
constexpr const char* kSummary1To2 = "AVX-512, AVX2 or NEON, threads: 1:2, any type, mask and head dim";
constexpr const char* kSummaryDense = "AVX-512, AVX2 or NEON, threads: dense, any type, mask and head dim";
constexpr const char* kSummaryAny = "AVX-512, AVX2 or NEON, threads: any pattern, type, mask and head dim";
constexpr const char* kReferenceSummary = "fp64 oracle, plain loops, one thread: any type, pattern, mask and head dim";

const KernelRow kCpuRows[] = {
    forward_row("cpu_2_4", kSummary2To4, unless_2_4, fast_forward, kFeatures),
    forward_row("cpu_1_2", kSummary1To2, unless_1_2, fast_forward, kFeatures),
    forward_row("cpu_dense", kSummaryDense, unless_dense, fast_forward, kAnyChoice),
    forward_row("cpu_any", kSummaryAny, unless_shared_fits, fast_forward, kAnyChoice),
    forward_row("cpu_reference", kReferenceSummary, serves_everything, reference_forward_kernel, kAnyChoice),
    backward_row("cpu_2_4", kSummary2To4, unless_2_4, fast_backward),
    backward_row("cpu_1_2", kSummary1To2, unless_1_2, fast_backward),
    backward_row("cpu_dense", kSummaryDense, unless_dense, fast_backward),
    backward_row("cpu_any", kSummaryAny, serves_everything, fast_backward),
    backward_row("cpu_reference", kReferenceSummary, serves_everything, reference_backward_kernel),
};

}  // namespace

std::span<const KernelRow> rows() { return kCpuRows; }

}  // namespace dspattn::cpu
