// dspattn verify: random problems over the whole contract, each kernel's result held against the fp64 oracle.
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "apps/commands.h"
#include "apps/machine.h"
#include "apps/parser.h"
#include "apps/problem_options.h"
#include "apps/verify.h"
#include "check/check.h"
#include "dspattn/error.h"

namespace dspattn::apps {
namespace {

struct VerifyOptions {
  std::int64_t count = 1000;
  std::optional<std::uint64_t> seed;
  std::optional<std::int64_t> only;
  std::string kernel;
  std::string device = "cpu";
  std::string pass, dtype, pattern, grouping, rest, selection;
  std::optional<std::int64_t> head_dim;
  std::int64_t max_n = check::DrawLimits{}.max_n;
  std::optional<std::int64_t> max_queries;
  std::int64_t max_work = check::DrawLimits{}.max_work;
  int jobs = 0;
};

check::CheckOptions check_options(const VerifyOptions& options) {
  check::CheckOptions chosen;
  chosen.device = parse_device(options.device);
  if (options.pass == "forward") {
    chosen.limits.pass = Pass::forward;
  } else if (options.pass == "backward") {
    chosen.limits.pass = Pass::backward;
  } else if (!options.pass.empty()) {
    throw Error("pass: expected forward or backward, got \"" + options.pass + "\"");
  }
  if (!options.dtype.empty()) chosen.limits.dtype = parse_dtype(options.dtype);
  if (!options.pattern.empty()) chosen.limits.pattern = parse_pattern(options.pattern);
  if (!options.grouping.empty()) chosen.limits.grouping = parse_grouping(options.grouping);
  if (!options.rest.empty()) chosen.limits.rest = parse_rest(options.rest);
  if (!options.selection.empty()) chosen.limits.choice = parse_selection(options.selection);
  if (chosen.limits.choice == Choice::shared && chosen.limits.pass == Pass::backward) {
    throw Error("selection: expected own with --pass backward (no kernel has gradients of another), got \"shared\"");
  }
  if (chosen.limits.rest == Rest::mean && chosen.limits.pass == Pass::backward) {
    throw Error("rest: expected drop with --pass backward (mean has no gradients), got \"mean\"");
  }
  if (options.head_dim && (*options.head_dim < 1 || *options.head_dim > kMaxHeadDim)) {
    throw Error("head-dim: expected 1 to " + std::to_string(kMaxHeadDim) + ", got " +
                std::to_string(*options.head_dim));
  }
  chosen.limits.head_dim = options.head_dim;
  constexpr std::int64_t kMostKeys = std::int64_t{1} << 30;  // so that no number of elements overflows
  if (options.max_n < 1 || options.max_n > kMostKeys) {
    throw Error("max-n: expected 1 to " + std::to_string(kMostKeys) + ", got " + std::to_string(options.max_n));
  }
  chosen.limits.max_n = options.max_n;
  if (options.max_queries && *options.max_queries < 1) {
    throw Error("max-queries: expected at least 1, got " + std::to_string(*options.max_queries));
  }
  chosen.limits.max_queries = options.max_queries;
  if (options.max_work < 1) throw Error("max-work: expected at least 1, got " + std::to_string(options.max_work));
  chosen.limits.max_work = options.max_work;
  return chosen;
}

void verify_as_asked(const VerifyOptions& options, Outcome& outcome) {
  const check::CheckOptions chosen = check_options(options);
  if (options.count < 1) throw Error("count: expected at least 1, got " + std::to_string(options.count));
  if (options.only && *options.only < 0) throw Error("case: expected 0 or more, got " + std::to_string(*options.only));
  if (options.only && !options.seed) throw Error("case: expected with --seed, which numbers the cases");
  if (options.jobs < 0) throw Error("jobs: expected 0 or more, got " + std::to_string(options.jobs));
  VerifyPlan plan;
  plan.seed = options.seed ? *options.seed : std::random_device{}();
  plan.count = options.count;
  plan.only = options.only;
  plan.jobs = options.jobs > 0 ? options.jobs : cpu_threads();
  const CheckCase check = [&](std::int64_t index) {
    return check::check_case(plan.seed, index, options.kernel, chosen);
  };
  // A name that is no kernel is an error of usage: found here, before workers start.
  if (!options.kernel.empty()) check(options.only.value_or(0));
  outcome.exit = verify(plan, check, std::cout);
}

}  // namespace

void register_verify(Parser& parser, Outcome& outcome) {
  Command command = parser.add_subcommand(
      "verify", "Check kernels on random problems of every kind against a plain fp64 computation");
  auto options = std::make_shared<VerifyOptions>();
  command.add_option("--count", options->count, "how many problems").type_name("COUNT").capture_default_str();
  command.add_option("--seed", options->seed, "what the problems are drawn from (default: a new one, printed)")
      .type_name("NUMBER");
  command.add_option("--case", options->only, "this one problem of the seed alone").type_name("INDEX");
  command.add_option("--kernel", options->kernel, "a kernel by name (default: whichever the library chooses)")
      .type_name("NAME");
  command.add_option("--device", options->device, "cpu, cuda or cuda:<index>").type_name("NAME").capture_default_str();
  command.add_option("--pass", options->pass, "only forward or only backward").type_name("NAME");
  command.add_option("--dtype", options->dtype, "only fp32, fp16 or bf16").type_name("TYPE");
  command.add_option("--pattern", options->pattern, "only this pattern").type_name("N:M");
  command.add_option("--grouping", options->grouping, "only interleaved or consecutive").type_name("NAME");
  command.add_option("--rest", options->rest, "only drop or only mean").type_name("NAME");
  command.add_option("--selection", options->selection, "only own or only shared").type_name("NAME");
  command.add_option("--head-dim", options->head_dim, "only this head dimension").type_name("COUNT");
  command.add_option("--max-n", options->max_n, "longest sequence").type_name("COUNT").capture_default_str();
  command.add_option("--max-queries", options->max_queries, "few queries: 1 to so many").type_name("COUNT");
  command.add_option("--max-work", options->max_work, "largest batch * heads * n_q * n_k * (d + d_v)")
      .type_name("COUNT")
      .capture_default_str();
  command.add_option("--jobs", options->jobs, "problems checked side by side; 0: one per CPU thread")
      .type_name("COUNT")
      .capture_default_str();
  command.footer(R"(
Patterns, groupings, rests, masks, types, strides, lengths from 0 on, packed batches and shared key heads are all drawn. A result
passes when its selection is right up to near-ties, its numbers are within tolerance, nothing else was written, and
reruns give the same bits. A failing problem is printed as the command that repeats it alone.
Examples:
  dspattn verify --count 10000
  dspattn verify --kernel cpu_reference --dtype fp16 --count 500
  dspattn verify --seed 7 --case 42
Exit code 1 when a problem failed, or when none was checked.)");
  command.callback([options, &outcome] { verify_as_asked(*options, outcome); });
}

}  // namespace dspattn::apps
