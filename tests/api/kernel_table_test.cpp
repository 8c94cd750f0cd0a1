// choose() asks rows whether they serve, consider() why not: both must come to the same answer, for every row the
// machine has (the emulator's GPU rows, too).
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

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
    auto first =
        std::find_if(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.reasons.empty() && !v.yields; });
    if (first == verdicts.end()) {
      first = std::find_if(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.reasons.empty(); });
    }
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

// What a problem needs beyond the plain contract is refused by name where a row does not serve it, never ignored.
TEST(KernelTable, WhatARowDoesNotServeItRefusesByName) {
  std::vector<float> memory(64 * 16, 0.5f);
  std::vector<std::int32_t> table{0};
  Problem plain;
  plain.q = plain.k = plain.v = {memory.data(), DType::f32, {1, 1, 16, 64}};
  const std::vector<std::pair<std::string, std::function<void(Problem&)>>> more{
      {"rest:", [](Problem& p) { p.rest = Rest::mean; }},
      {"choice:", [](Problem& p) { p.choice = Choice::shared; }},
      {"dropout:", [](Problem& p) { p.dropout.probability = 0.5; }},
      {"soft_cap:", [](Problem& p) { p.soft_cap = 30; }},
      {"sinks:",
       [&](Problem& p) {
         p.sinks = {memory.data(), DType::f32, {1}};
       }},
      {"block_table:",
       [&](Problem& p) {
         p.block_table = {table.data(), DType::i32, {1, 1}};
       }},
  };
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const DeviceType type : {DeviceType::cpu, DeviceType::cuda}) {
      plain.device = {type, 0};
      const auto before = consider(plain, pass);
      for (const auto& [word, need] : more) {
        Problem problem = plain;
        need(problem);
        const auto after = consider(problem, pass);
        for (std::size_t row = 0; row < after.size(); ++row) {
          // Rows that a mean, say, makes no difference to serve it; the others say so. Nothing else changes.
          const auto mentions = [&, &what = word](const std::string& reason) { return reason.starts_with(what); };
          const bool refused = std::ranges::any_of(after[row].reasons, mentions);
          EXPECT_EQ(after[row].reasons.size(), before[row].reasons.size() + (refused ? 1 : 0))
              << after[row].kernel.name << ' ' << word;
        }
      }
    }
  }
}

// Parts of a result that are to be merged: every forward kernel writes them in fp32, so the choice is that of a whole
// result. A kernel for gradients that does not take them says which does.
TEST(KernelTable, PartialResultsAreServedByTheKernelOfWholeOnes) {
  std::vector<std::uint16_t> memory(512 * 64);
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const DeviceType type : {DeviceType::cpu, DeviceType::cuda}) {
      Problem problem;
      problem.q = problem.k = problem.v = {memory.data(), dtype, {1, 1, 256, 64}};
      problem.pattern = dtype == DType::f32 ? Pattern{1, 2} : Pattern{2, 4};
      problem.device = {type, 0};
      const auto whole = consider(problem, Pass::forward), parts = consider(problem, Pass::forward, Results::fp32);
      bool served = false;
      for (std::size_t row = 0; row < whole.size(); ++row) {
        EXPECT_EQ(parts[row].reasons, whole[row].reasons) << whole[row].kernel.name;
        served = served || whole[row].reasons.empty();
      }
      if (served) {
        EXPECT_EQ(choose(problem, Pass::forward, {}, Results::fp32).name, choose(problem, Pass::forward).name);
      }
      for (const Verdict& verdict : consider(problem, Pass::backward, Results::fp32)) {
        for (const std::string& reason : verdict.reasons) {
          EXPECT_TRUE(!reason.starts_with("out.dtype:") || reason.find("; served by general_") != std::string::npos)
              << reason;
        }
      }
    }
  }
}

}  // namespace
}  // namespace dspattn
