// The general backward on a GPU: random problems of the whole contract per type and class of patterns against the
// oracle, reruns bit for bit (random_problems.h: how many), and a walk over the contract on which no gradient is
// refused. Skipped without a GPU of compute capability 8.0 or later.
//
// A problem's forward is the general one, whose selection must be repeated bit for bit, or gradients are far off where
// scores nearly tie.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>

#include "api/device_memory.h"
#include "cuda/general_classes.h"

namespace dspattn {
namespace {

check::CheckOptions backward_options(const GeneralClass& of, std::int64_t index, bool short_only) {
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
      of.name, of.kernel(),
      [&](std::int64_t index, bool short_only) { return backward_options(of, index, short_only); },
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

// A problem set up by hand.
check::Case problem_of(DType dtype, std::int64_t n_q, std::int64_t n_k, std::int64_t d) {
  check::Case drawn;
  drawn.seed = 5;
  drawn.pass = Pass::backward;
  drawn.dtype = dtype;
  drawn.bias_dtype = dtype;
  drawn.pattern = {2, 4};
  drawn.heads = 2;
  drawn.n_q = n_q;
  drawn.n_k = n_k;
  drawn.d = drawn.d_v = d;
  return drawn;
}

void expect_right(const check::Case& drawn) {
  const std::string kernel = "general_" + std::string(name(drawn.dtype));
  check::CheckOptions options;
  options.device = {DeviceType::cuda, 0};
  expect_passed(
      check::check_drawn(drawn, check::library_runner(api::memory_of(options.device), kernel, kernel), options));
}

class GeneralBackwardEdges : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  }
};

// Capped scores with a bias are rounded as the forward rounds them: weights are relative to its LSE.
TEST_P(GeneralBackwardEdges, SoftCapsBesideHugeBiases) {
  check::Case drawn = problem_of(GetParam(), 20, 36, 40);
  drawn.bias.emplace();
  drawn.extreme_bias = true;
  for (const bool lowest : {false, true}) {
    drawn.lowest_bias = lowest;
    drawn.soft_cap = lowest ? 5 : 50;
    drawn.d_bias = !lowest;
    expect_right(drawn);
  }
}

// The cap's slope at a score that is NaN must not reach keys that its row does not see.
TEST_P(GeneralBackwardEdges, NanOfASoftCapStaysInTheWindow) {
  check::Case drawn = problem_of(GetParam(), 12, 12, 32);
  drawn.causal = true;
  drawn.window_left = 1;
  drawn.nan_in_q = true;
  for (const bool capped : {true, false}) {
    drawn.soft_cap = capped ? std::optional<double>(50) : std::nullopt;
    expect_right(drawn);
  }
}

// An LSE of the size of the lowest bias, rounded, says nothing of a row's weights.
TEST_P(GeneralBackwardEdges, TheSameLowestBiasOfAllKeys) {
  check::Case drawn = problem_of(GetParam(), 24, 40, 32);
  drawn.bias.emplace();
  drawn.bias->one = {true, true, true, false};
  drawn.bias->zero_stride = {false, false, false, true};
  drawn.bias_dtype = DType::f32;
  drawn.lowest_bias = true;
  drawn.scale = 0.16617;
  drawn.fp32_results = drawn.dtype != DType::f32;
  drawn.d_lse = drawn.d_bias = true;
  for (const std::uint64_t seed : {5, 6, 7, 8}) {  // whether the bias is the lowest number is drawn
    drawn.seed = seed;
    expect_right(drawn);
  }
}

// Past d = 256 dQ's columns are shared out over CTAs, and eight warps share a key tile; fp32's forward has one warp.
TEST_P(GeneralBackwardEdges, HeadDimsPast256) {
  check::Case drawn = problem_of(GetParam(), 12, 36, 300);
  drawn.d_v = 264;
  expect_right(drawn);
  drawn.bias.emplace();
  drawn.bias->one = {false, true, true, false};
  drawn.fp32_products = Fp32Products::tf32_allowed;
  drawn.d_bias = true;
  expect_right(drawn);
}

// Several key blocks and query tiles that wait for each other, and what instances without features must know of.
TEST_P(GeneralBackwardEdges, SharesOfManyKeyBlocks) {
  for (const std::int64_t d : {64, 128}) {
    check::Case drawn = problem_of(GetParam(), 90, 260, d);
    drawn.kv_heads = 1;
    drawn.grouping = Grouping::interleaved;
    drawn.causal = d == 128;
    drawn.window_left = d == 128 ? std::optional<std::int64_t>(150) : std::nullopt;
    drawn.nan_in_q = true;
    drawn.pattern = d == 128 ? Pattern{1, 2} : Pattern{2, 4};
    drawn.sinks = drawn.d_sinks = drawn.d_lse = true;
    expect_right(drawn);
  }
}

// Groups within a lane, of two lanes, four and all that have the same rows.
TEST_P(GeneralBackwardEdges, GroupsOfEverySize) {
  for (const Pattern pattern : {Pattern{1, 4}, Pattern{3, 8}, Pattern{5, 16}, Pattern{9, 32}}) {
    check::Case drawn = problem_of(GetParam(), 40, 70, pattern.group == 8 ? 128 : 64);
    drawn.pattern = pattern;
    drawn.causal = pattern.keep == 9;
    drawn.grouping = pattern.keep == 5 ? Grouping::consecutive : Grouping::interleaved;
    expect_right(drawn);
  }
}

// More steps of a key tile than are described at once, twice.
TEST_P(GeneralBackwardEdges, ManyHeadsOfOneKeyHead) {
  check::Case drawn = problem_of(GetParam(), 3, 9, 64);
  drawn.heads = 35;
  drawn.kv_heads = 1;
  expect_right(drawn);
}

// Biases among which scores in fp16 decide nothing, and gradients that fp16 cannot hold: two that random problems
// found.
TEST(GeneralBackwardCases, OfFp16) {
  if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  check::CheckOptions options;
  options.device = {DeviceType::cuda, 0};
  options.limits.pass = Pass::backward;
  options.limits.dtype = DType::f16;
  options.limits.max_n = 60;
  for (const std::int64_t index : {7, 64}) expect_passed(check::check_case(77, index, "general_fp16", options));
}

INSTANTIATE_TEST_SUITE_P(Types, GeneralBackwardEdges, ::testing::Values(DType::bf16, DType::f16, DType::f32),
                         [](const ::testing::TestParamInfo<DType>& of) { return std::string(name(of.param)); });

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
