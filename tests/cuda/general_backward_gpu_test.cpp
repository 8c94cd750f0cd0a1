// The general backward on a GPU: random problems of the whole contract per type and class of patterns against the
// oracle, reruns bit for bit (random_problems.h: how many), and a walk over the contract on which no gradient is
// refused. Skipped without a GPU of compute capability 8.0 or later.
//
// A problem's forward is the general one, whose selection must be repeated bit for bit, or gradients are far off where
// scores nearly tie.
#include <gtest/gtest.h>

#include <string>

#include "cuda/general_classes.h"

namespace dspattn {
namespace {

check::CheckOptions options_of(const GeneralClass& of, std::int64_t index, bool short_only) {
  check::CheckOptions options = of.options(Pass::backward, index);
  if (index % 4 == 0) options.limits.head_dim = index % 8 == 0 ? 128 : 64;
  if (short_only) {
    options.limits.max_n = 150;
    options.limits.max_work = 1'500'000;
  } else if (index % 4 >= 2) {
    options.limits.max_n = 2049;
    options.limits.max_work = 60'000'000;
  }
  return options;
}

class GeneralBackward : public ::testing::TestWithParam<GeneralClass> {
 protected:
  void SetUp() override {
    if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_P(GeneralBackward, AgreesWithTheOracleOnRandomProblems) {
  const GeneralClass& of = GetParam();
  expect_agreement(
      of.name, of.kernel(), [&](std::int64_t index, bool short_only) { return options_of(of, index, short_only); },
      [](const check::Case&) { return true; });
}

TEST_P(GeneralBackward, GivesTheSameBitsOverReruns) {
  check::CheckOptions options = GetParam().options(Pass::backward, 0);
  options.limits.max_n = 1025;
  options.limits.max_work = 60'000'000;
  options.reruns = 20;
  expect_same_bits(GetParam().kernel(), options, 2, [](const check::Case&) { return true; });
}

INSTANTIATE_TEST_SUITE_P(Classes, GeneralBackward, ::testing::ValuesIn(general_classes()), name_of<GeneralClass>);

// No row of the table but the general ones serves all features, so that each of them must be served by one row
// together.
TEST(GeneralBackwardTable, EveryValidGradientIsServed) {
  if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  expect_all_served(Pass::backward);
  constexpr core::Feature kGradients[] = {core::Feature::d_lse, core::Feature::d_bias, core::Feature::d_sinks};
  for (const core::KernelRow& row : cuda::general::general_rows()) {
    if (row.info.pass != Pass::backward) continue;
    for (const core::Feature feature : kGradients) EXPECT_TRUE(row.features.has(feature));
  }
}

}  // namespace
}  // namespace dspattn
