// The general backward on a GPU: random problems of the whole contract per type and class of patterns against the
// oracle, reruns bit for bit, and a walk over the contract on which no gradient is refused. Skipped without a GPU of
// compute capability 8.0 or later.
//
// A problem's forward is the general one, whose selection must be repeated bit for bit, or gradients are far off where
// scores nearly tie.
//   DSPATTN_FUSED_CASES   problems per class (default 40; 300 for the full check; below 20 only short ones)
//   DSPATTN_FUSED_SEED    what they are drawn from (default 7)
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include "check/case_data.h"
#include "check/check.h"
#include "core/device_memory.h"
#include "cuda/device/device.h"
#include "cuda/general/rows.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace {

std::int64_t from_environment(const char* name, std::int64_t otherwise) {
  const char* given = std::getenv(name);
  return given != nullptr ? std::max(1LL, std::atoll(given)) : otherwise;
}

bool has_gpu() { return cuda::device_facts(0).present && cuda::device_facts(0).major >= 8; }

// A type and the patterns of a class, drawn by turns.
struct Class {
  std::string name;
  DType dtype;
  std::vector<Pattern> patterns;

  std::string kernel() const { return "general_" + std::string(dspattn::name(dtype)); }
};

std::vector<Class> classes() {
  std::vector<Class> all;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    const std::string type(name(dtype));
    all.push_back({type + "_2_4", dtype, {{2, 4}}});
    all.push_back({type + "_1_2", dtype, {{1, 2}}});
    all.push_back({type + "_dense", dtype, {Pattern::dense()}});
    all.push_back({type + "_other", dtype, {{1, 4}, {4, 8}, {3, 5}, {2, 16}, {5, 32}, {20, 31}}});
  }
  return all;
}

check::CheckOptions options_of(const Class& of, std::int64_t index) {
  check::CheckOptions options;
  options.device = {DeviceType::cuda, 0};
  options.limits.pass = Pass::backward;
  options.limits.dtype = of.dtype;
  options.limits.pattern = of.patterns[static_cast<std::size_t>(index) % of.patterns.size()];
  if (kInterleaveBlock % options.limits.pattern->group != 0) options.limits.grouping = Grouping::consecutive;
  return options;
}

class GeneralBackward : public ::testing::TestWithParam<Class> {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "needs a GPU of compute capability 8.0";
  }
  static void expect_passed(const check::CaseReport& report) {
    ASSERT_TRUE(report.served) << report.description << "\n" << report.reasons.front();
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << report.description << "\n" << failure << "\n" << report.command;
    }
  }
};

TEST_P(GeneralBackward, AgreesWithTheOracleOnRandomProblems) {
  const Class& of = GetParam();
  const std::int64_t wanted = from_environment("DSPATTN_FUSED_CASES", 40);
  const auto seed = static_cast<std::uint64_t>(from_environment("DSPATTN_FUSED_SEED", 7));
  double worst = 0;
  for (std::int64_t index = 0; index < wanted; ++index) {
    check::CheckOptions options = options_of(of, index);
    if (index % 4 == 0) options.limits.head_dim = index % 8 == 0 ? 128 : 64;
    if (index % 4 >= 2 && wanted >= 20) {
      options.limits.max_n = 2049;
      options.limits.max_work = 60'000'000;
    } else if (wanted < 20) {
      options.limits.max_n = 150;
      options.limits.max_work = 1'500'000;
    }
    const check::CaseReport report = check::check_case(seed, index, of.kernel(), options);
    worst = std::max(worst, report.worst);
    expect_passed(report);
  }
  std::cout << of.name << ": " << wanted << " problems; largest error " << worst << " of what is allowed\n";
}

TEST_P(GeneralBackward, GivesTheSameBitsOverReruns) {
  const Class& of = GetParam();
  int checked = 0;
  for (std::int64_t index = 0; checked < 2 && index < 1000; ++index) {
    check::CheckOptions options = options_of(of, 0);
    options.limits.max_n = 1025;
    options.limits.max_work = 60'000'000;
    options.reruns = 20;
    const check::Case drawn = check::draw_case(11, index, options.limits);
    if (drawn.batch * drawn.heads * drawn.n_q < 500 || drawn.n_k < 300) continue;
    expect_passed(check::check_case(11, index, of.kernel(), options));
    ++checked;
  }
  EXPECT_EQ(checked, 2);
}

INSTANTIATE_TEST_SUITE_P(Classes, GeneralBackward, ::testing::ValuesIn(classes()),
                         [](const ::testing::TestParamInfo<Class>& of) { return of.param.name; });

// Random problems as if on the GPU: a kernel is chosen by shapes, types and addresses alone. No row of the table but
// the general ones serves all features, so that each of them must be served by one row together.
TEST(GeneralBackwardTable, EveryValidGradientIsServed) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU of compute capability 8.0";
  std::set<std::string> chosen;
  check::DrawLimits limits;
  limits.pass = Pass::backward;
  limits.max_work = 100'000;
  for (std::int64_t index = 0; index < 400; ++index) {
    const check::Case drawn = check::draw_case(9, index, limits);
    const check::CaseData data(drawn, {}, core::host_memory());
    Problem problem = data.host_problem();
    problem.device = {DeviceType::cuda, 0};
    try {
      chosen.insert(std::string(choose(problem, Pass::backward, {}, drawn.results()).name));
    } catch (const Error& error) {
      ADD_FAILURE() << check::describe(drawn) << "\n" << error.what();
    }
  }
  constexpr core::Feature kGradients[] = {core::Feature::d_lse, core::Feature::d_bias, core::Feature::d_sinks};
  for (const core::KernelRow& row : cuda::general::general_rows()) {
    if (row.info.pass != Pass::backward) continue;
    EXPECT_TRUE(chosen.contains(std::string(row.info.name))) << row.info.name;
    for (const core::Feature feature : kGradients) EXPECT_TRUE(row.features.has(feature));
  }
}

}  // namespace
}  // namespace dspattn
