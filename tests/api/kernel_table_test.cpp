// choose() asks rows whether they serve, consider() why not: both must come to the same answer, for every row the
// machine has (the emulator's GPU rows, too).
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "check/case.h"
#include "check/case_data.h"
#include "core/device_memory.h"
#include "dspattn/error.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace {

using check::Case;
using check::CaseData;
using check::draw_case;
using check::DrawLimits;

// Calls visit(problem, pass) for random problems, on the CPU and as if their tensors were on a GPU: a kernel is chosen
// by shapes, types and addresses alone.
template <typename Visit>
void for_problems(Visit visit) {
  DrawLimits limits;
  limits.max_work = 100'000;
  for (std::int64_t index = 0; index < 200; ++index) {
    const Case drawn = draw_case(5, index, limits);
    const CaseData data(drawn, {}, core::host_memory());
    Problem problem = data.host_problem();
    for (const DeviceType type : {DeviceType::cpu, DeviceType::cuda}) {
      problem.device = {type, 0};
      visit(problem, drawn.pass);
    }
  }
}

TEST(KernelTable, ChoosesTheFirstRowWithNothingAgainstTheProblem) {
  std::set<std::string> chosen;
  for_problems([&](const Problem& problem, Pass pass) {
    const auto verdicts = consider(problem, pass);
    const auto first =
        std::find_if(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.reasons.empty(); });
    if (first == verdicts.end()) {
      EXPECT_THROW(choose(problem, pass), Error);
    } else {
      EXPECT_EQ(choose(problem, pass).name, first->kernel.name);
      chosen.insert(std::string(first->kernel.name));
    }
  });
  EXPECT_GE(chosen.size(), 4u) << "the problems leave rows untried";
}

TEST(KernelTable, ARowAskedForServesOrSaysEverythingItHasAgainstIt) {
  for_problems([](const Problem& problem, Pass pass) {
    for (const Verdict& verdict : consider(problem, pass)) {
      try {
        EXPECT_EQ(choose(problem, pass, verdict.kernel.name).name, verdict.kernel.name);
        EXPECT_TRUE(verdict.reasons.empty()) << verdict.kernel.name;
      } catch (const Error& error) {
        EXPECT_FALSE(verdict.reasons.empty()) << verdict.kernel.name;
        for (const std::string& reason : verdict.reasons) {
          EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << reason;
        }
      }
    }
  });
}

}  // namespace
}  // namespace dspattn
