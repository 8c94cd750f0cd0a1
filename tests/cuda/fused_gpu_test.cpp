// Every row of the fused forward on a GPU: random problems of the whole contract against the oracle. Skipped without
// one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "check/check.h"
#include "cuda/device.h"
#include "cuda/sm90/fused/rows.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace {

class FusedRow : public ::testing::TestWithParam<std::string> {};

// Problems per row; DSPATTN_FUSED_CASES=300 for the full check, a handful under compute-sanitizer.
int wanted_cases() {
  const char* given = std::getenv("DSPATTN_FUSED_CASES");
  return given != nullptr ? std::max(1, std::atoi(given)) : 40;
}

TEST_P(FusedRow, AgreesWithTheOracleOnRandomProblems) {
  const cuda::DeviceFacts& device = cuda::device_facts(0);
  if (!device.present || device.major != 9) {
    GTEST_SKIP() << "needs a Hopper GPU: " << (device.present ? "another architecture" : device.absence);
  }
  const std::string kernel = GetParam();
  check::CheckOptions options;
  options.device = {DeviceType::cuda, 0};
  options.limits.pass = Pass::forward;
  options.limits.dtype = kernel.find("bf16") != std::string::npos ? DType::bf16 : DType::f16;
  options.limits.pattern = kernel.find("_2_4_") != std::string::npos ? Pattern{2, 4} : Pattern{1, 2};
  int served = 0;
  for (std::int64_t index = 0; served < wanted_cases() && index < 100 * wanted_cases(); ++index) {
    // Half of the problems at the row's own head dim, the others at whatever is drawn and the row serves.
    options.limits.head_dim.reset();
    if (index % 2 == 0) options.limits.head_dim = std::stoi(kernel.substr(kernel.rfind('d') + 1));
    const check::CaseReport report = check::check_case(7, index, kernel, options);
    if (!report.served) continue;
    ++served;
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << report.description << "\n" << failure << "\n" << report.command;
    }
  }
  EXPECT_GE(served, wanted_cases() / 2);
}

std::vector<std::string> row_names() {
  std::vector<std::string> names;
  for (const core::KernelRow& row : cuda::sm90::fused_rows()) names.emplace_back(row.info.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Table, FusedRow, ::testing::ValuesIn(row_names()),
                         [](const ::testing::TestParamInfo<std::string>& row) { return row.param; });

}  // namespace
}  // namespace dspattn
