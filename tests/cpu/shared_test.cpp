// choice = shared: by hand, against the oracle on every instruction set, and in tiles that groups of heads do not fill.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/half.h"
#include "cpu/every_target.h"
#include "cpu/fast_case.h"
#include "cpu/reference.h"
#include "dspattn/kernels.h"

namespace dspattn::cpu {
namespace {

using namespace test;

// Two heads of one key head: weights .6 .4 | .0 .0 ... and .1 .9 before pruning. Alone the first would keep key 0.
TEST(Shared, HeadsKeepTheKeysOfTheLargestSummedWeights) {
  const float q[] = {1, 0, 0, 1};  // [heads, 1, 2]: head h reads column h of k
  const float k[] = {std::log(6.0f), std::log(1.0f), std::log(4.0f), std::log(9.0f)};
  const float v[] = {10, 20};
  float out[2] = {}, lse[2] = {};
  ForwardArgs args;
  args.problem.q = {q, DType::f32, {1, 2, 1, 2}};
  args.problem.k = {k, DType::f32, {1, 1, 2, 2}};
  args.problem.v = {v, DType::f32, {1, 1, 2, 1}};
  args.problem.pattern = {1, 2};
  args.problem.grouping = Grouping::consecutive;
  args.problem.scale = 1.0;
  args.out = {out, DType::f32, {1, 2, 1, 1}};
  args.lse = {lse, DType::f32, {1, 2, 1}};
  for (const char* kernel : {"", "cpu_any", "cpu_reference"}) {
    args.run.kernel = kernel;
    args.problem.choice = dspattn::Choice::each_head;
    forward(args);
    EXPECT_NEAR(out[0], 10, 1e-5);
    EXPECT_NEAR(out[1], 20, 1e-5);
    args.problem.choice = dspattn::Choice::shared;
    forward(args);
    EXPECT_NEAR(out[0], 20, 1e-5) << kernel;
    EXPECT_NEAR(out[1], 20, 1e-5) << kernel;
    EXPECT_NEAR(lse[0], std::log(4.0), 1e-6) << kernel;
    args.problem.rest = Rest::mean;
    forward(args);
    EXPECT_NEAR(out[0], 0.4 * 20 + 0.6 * 15, 1e-5) << kernel;
    EXPECT_NEAR(lse[0], std::log(10.0), 1e-6) << kernel;
    args.problem.rest = Rest::drop;
  }
}

TEST(Shared, RowsForOnePatternLeaveItToTheGeneralOne) {
  Numbers numbers{1};
  Case c;
  c.heads = 2;
  c.n_q = c.n_k = 8;
  c.d = c.d_v = 16;
  c.problem.choice = dspattn::Choice::shared;
  c.make(numbers, true);
  EXPECT_EQ(choose(c.problem, Pass::forward).name, "cpu_any");
  try {
    choose(c.problem, Pass::forward, "cpu_2_4");
    FAIL() << "has no shared choice";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("choice: takes each head's own, got shared"), std::string::npos);
  }
  Case many;
  many.heads = 33;
  many.n_q = many.n_k = 3;
  many.problem.choice = dspattn::Choice::shared;
  many.make(numbers, true);
  EXPECT_EQ(choose(many.problem, Pass::forward).name, "cpu_reference");
}

class SharedOnEveryTarget : public EveryTarget {};
INSTANTIATE_TEST_SUITE_P(Cpu, SharedOnEveryTarget, testing::ValuesIn(targets()), target_name);

// Scores far enough apart that no sum is a near-tie: the selection is the oracle's.
TEST_P(SharedOnEveryTarget, MatchesTheOracleWhateverTheNumberOfHeads) {
  for (const std::int64_t group : {1, 3, 5, 32}) {
    Numbers numbers{static_cast<std::uint64_t>(group)};
    Case c;
    c.kv_heads = 2;
    c.heads = 2 * group;
    c.n_q = group == 32 ? 5 : 45;
    c.n_k = 150;
    c.d = 24;
    c.d_v = 17;
    c.problem.choice = dspattn::Choice::shared;
    c.problem.pattern = group % 2 == 0 ? Pattern{1, 2} : Pattern{2, 4};
    c.problem.mask.causal = group == 3;
    if (group == 5) c.problem.rest = Rest::mean;
    c.make(numbers, false);
    const Reference oracle = reference_forward(c.problem);
    double least = std::numeric_limits<double>::infinity();
    for (const Choice& choice : oracle.choices) least = std::min(least, choice.gap);
    ASSERT_GT(least, 1e-8) << "a near-tie: take other numbers";
    const Forward ours = run_forward(c, "cpu_any", 2);
    expect_close(ours.out.values(), oracle.out, 4e-6, 0x1p-22, "out");
    expect_close(ours.lse.values(), oracle.lse, 4e-6, 1e-6, "lse");
    const Forward alone = run_forward(c, "cpu_any", 1);
    EXPECT_EQ(ours.out.memory, alone.out.memory);
  }
}

// A NaN in one head's query is that head's affair.
TEST_P(SharedOnEveryTarget, NanInOneHeadStaysThere) {
  Numbers numbers{9};
  Case c;
  c.heads = 3;
  c.n_q = 4;
  c.n_k = 140;
  c.d = c.d_v = 16;
  c.problem.choice = dspattn::Choice::shared;
  c.make(numbers, true);
  const TensorView& q = c.tensors[0].view;
  core::store_element(q.data, q.dtype, q.step(1) + 2 * q.step(2), std::nan(""));
  const Forward ours = run_forward(c, "cpu_any", 1);
  const std::vector<double> lse = ours.lse.values(), oracle = reference_forward(c.problem).lse;
  for (std::size_t row = 0; row < lse.size(); ++row) {
    EXPECT_EQ(std::isnan(lse[row]), row == 6) << row;
    EXPECT_EQ(std::isnan(oracle[row]), row == 6) << row;
  }
}

}  // namespace
}  // namespace dspattn::cpu
