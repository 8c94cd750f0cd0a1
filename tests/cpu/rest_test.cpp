// rest = mean: the oracle by hand, the fast rows against it on every instruction set, and what must not reach a row.
#include "cpu/rest.h"

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

Case plain_case(std::int64_t n_q, std::int64_t n_k, Pattern pattern = {2, 4}) {
  Case c;
  c.heads = 4;
  c.kv_heads = 2;
  c.n_q = n_q;
  c.n_k = n_k;
  c.d = 16;
  c.d_v = 21;
  c.problem.pattern = pattern;
  c.problem.rest = Rest::mean;
  return c;
}

double value_at(const Case& c, std::int64_t kv_head, std::int64_t key, std::int64_t column) {
  const TensorView& v = c.tensors[2].view;
  return core::load_element(v.data, v.dtype, kv_head * v.step(1) + key * v.step(2) + column);
}

void set_values(Case& c, std::int64_t key, double value) {
  const TensorView& v = c.tensors[2].view;
  for (std::int64_t b = 0; b < v.extent(0); ++b) {
    for (std::int64_t h = 0; h < c.kv_heads; ++h) {
      for (std::int64_t x = 0; x < c.d_v; ++x) {
        core::store_element(v.data, v.dtype, b * v.step(0) + h * v.step(1) + key * v.step(2) + x, value);
      }
    }
  }
}

void expect_oracle_means(const Case& c, const std::string& kernel = {}) {
  const Reference oracle = reference_forward(c.problem);
  const Forward ours = run_forward(c, kernel, 2);
  expect_close(ours.out.values(), oracle.out, 4e-6, c.dtype == DType::f32 ? 0x1p-22 : 0x1p-8, "out");
  expect_close(ours.lse.values(), oracle.lse, 4e-6, 1e-6, "lse");
}

// Scores 0, log 2, log 3, log 4: the two largest have weights 3 and 4 of 10, the others bring 3 tenths of the mean.
TEST(Rest, IsTheWeightOfThePrunedKeysTimesTheMean) {
  const float q = 1;
  const float k[] = {std::log(4.0f), 0, std::log(3.0f), std::log(2.0f)};
  const float v[] = {10, 20, 30, 60};
  float out = 0, lse = 0;
  ForwardArgs args;
  args.problem.q = {&q, DType::f32, {1, 1, 1, 1}};
  args.problem.k = {k, DType::f32, {1, 1, 4, 1}};
  args.problem.v = {v, DType::f32, {1, 1, 4, 1}};
  args.problem.grouping = Grouping::consecutive;
  args.problem.rest = Rest::mean;
  args.out = {&out, DType::f32, {1, 1, 1, 1}};
  args.lse = {&lse, DType::f32, {1, 1, 1}};
  for (const char* kernel : {"cpu_2_4", "cpu_any", "cpu_reference"}) {
    args.run.kernel = kernel;
    forward(args);
    EXPECT_NEAR(out, (4 * 10 + 3 * 30 + 3 * 30) / 10.0, 1e-5) << kernel;
    EXPECT_NEAR(lse, std::log(10.0), 1e-6) << kernel;
  }
}

// The keys [begin, end) that the mean of a row must be over, from the interval [low, high) that it sees.
struct Interval {
  std::int64_t low, high, begin, end;
};

TEST(Rest, TheMeanIsOverWholeBlocksOrElseOverTheInterval) {
  constexpr std::int64_t kLeft = 299;
  for (const Interval& expected :
       {Interval{0, 100, 0, 100}, Interval{0, 128, 0, 128}, Interval{0, 200, 0, 128}, Interval{0, 300, 0, 256},
        Interval{1, 301, 128, 256}, Interval{129, 429, 256, 384}}) {
    Numbers numbers{3};
    Case c = plain_case(1, 450);
    c.problem.mask.causal = true;
    c.problem.mask.window_left = kLeft;
    c.problem.mask.alignment = Alignment::top_left;
    c.problem.mask.offset = expected.high - 1;
    c.make(numbers, true);
    const Reference oracle = reference_forward(c.problem);
    for (std::int64_t head = 0; head < c.heads; ++head) {
      double sum = 0;
      for (std::int64_t j = expected.begin; j < expected.end; ++j) sum += value_at(c, head / 2, j, 5);
      EXPECT_NEAR(oracle.means[static_cast<std::size_t>(head * c.d_v + 5)],
                  sum / static_cast<double>(expected.end - expected.begin), 1e-12)
          << expected.low << " to " << expected.high;
    }
    expect_oracle_means(c);
  }
}

TEST(Rest, GradientsAreRefusedWithTheReason) {
  Numbers numbers{1};
  Case c = plain_case(4, 8);
  c.make(numbers, true);
  const Forward done = run_forward(c, "", 1);
  try {
    run_backward(c, done, random_d_out(c), "", 1);
    FAIL() << "mean has no gradients";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rest: expected drop for gradients"), std::string::npos) << error.what();
  }
}

TEST(Rest, EveryBlockSumIsFoundAgain) {
  Numbers numbers{2};
  Case c = plain_case(3, 700);
  c.cu_q = {0, 3, 3, 8, 9};
  c.cu_k = {0, 300, 500, 627, 700 + 256};
  c.batch = 4;
  c.problem.packed = Packed{{c.cu_q.data(), DType::i32, {5}}, {c.cu_k.data(), DType::i32, {5}}, 5, 329};
  c.make(numbers, true);
  const Job job(c.problem);
  const BlockSums sums(job, PanelShape::of(c.d_v));
  // Two key heads, whole blocks of 300, 127 and 329 keys; the sequence without queries needs none.
  ASSERT_EQ(sums.entries(), 2 * (2 + 0 + 0 + 2));
  for (std::int64_t index = 0; index < sums.entries(); ++index) {
    const BlockSums::Entry entry = sums.entry(index);
    EXPECT_EQ(sums.index_of(job.sequence(entry.sequence), entry.head, entry.block), index);
    EXPECT_EQ(sums.index_of(job.sequence(entry.sequence), entry.head + 1, entry.block), index);
  }
}

class RestOnEveryTarget : public EveryTarget {};
INSTANTIATE_TEST_SUITE_P(Cpu, RestOnEveryTarget, testing::ValuesIn(targets()), target_name);

TEST_P(RestOnEveryTarget, RandomProblemsMatchTheOracle) {
  for (std::uint64_t seed = 0; seed < (kSanitized ? 8 : 30); ++seed) {
    Case c = random_case(seed);
    c.problem.rest = Rest::mean;
    for (ConstTensorView* mask : {&c.problem.mask.allowed, &c.problem.mask.bias}) {
      if (mask->present()) mask->shape[2] = 1;
    }
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + c.text);
    expect_oracle_means(c);
    if (HasFatalFailure()) return;
  }
}

// Every way in which a key is hidden: by length, by a mask, by a bias of -inf, and from some rows by causality and
// window. A NaN there reaches no row that does not see it.
TEST_P(RestOnEveryTarget, ValuesOfHiddenKeysReachNothing) {
  Numbers numbers{8};
  Case c = plain_case(300, 300);
  c.batch = 2;
  c.key_lengths = {290, 257};
  c.problem.mask.key_lengths = {c.key_lengths.data(), DType::i32, {2}};
  c.allowed.assign(300, 1);
  c.problem.mask.allowed = {c.allowed.data(), DType::b8, {1, 1, 1, 300}};
  std::vector<float> bias(300 * 4, 0.5f);
  c.problem.mask.bias = {bias.data(), DType::f32, {1, 4, 1, 300}};
  c.make(numbers, true);
  for (const std::int64_t key : {3, 140, 141, 200}) c.allowed[static_cast<std::size_t>(key)] = 0;
  for (const std::size_t key : {10, 255}) {
    for (std::size_t head = 0; head < 4; ++head) bias[head * 300 + key] = -std::numeric_limits<float>::infinity();
  }
  for (const std::int64_t key : {3, 10, 140, 141, 200, 255, 290, 299}) set_values(c, key, std::nan(""));
  for (const double value : run_forward(c, "", 2).out.values()) ASSERT_TRUE(std::isfinite(value));
  expect_oracle_means(c);

  c.problem.mask.causal = true;
  c.problem.mask.window_left = 130;
  set_values(c, 50, std::nan(""));
  const std::vector<double> out = run_forward(c, "", 2).out.values();
  for (std::int64_t i = 0; i < c.n_q; ++i) {
    const bool sees = i >= 50 && i - 50 <= 130;
    const double value = out[static_cast<std::size_t>(i * c.d_v)];
    ASSERT_TRUE(sees || std::isfinite(value)) << i;
  }
}

// Masks that hide every key of the whole blocks leave the mean to the others.
TEST_P(RestOnEveryTarget, HiddenBlocksLeaveTheMeanToTheInterval) {
  Numbers numbers{4};
  Case c = plain_case(5, 200);
  c.allowed.assign(200, 1);
  for (std::size_t j = 0; j < 128; ++j) c.allowed[j] = 0;
  c.problem.mask.allowed = {c.allowed.data(), DType::b8, {1, 1, 1, 200}};
  c.make(numbers, true);
  for (std::int64_t j = 0; j < 128; ++j) set_values(c, j, std::nan(""));
  const Reference oracle = reference_forward(c.problem);
  double sum = 0;
  for (std::int64_t j = 128; j < 200; ++j) sum += value_at(c, 0, j, 0);
  EXPECT_NEAR(oracle.means[0], sum / 72, 1e-12);
  expect_oracle_means(c);
}

TEST_P(RestOnEveryTarget, AVisibleNanScoreMakesItsRowsNan) {
  Numbers numbers{6};
  Case c = plain_case(160, 160);
  c.problem.mask.causal = true;
  c.make(numbers, true);
  const TensorView& k = c.tensors[1].view;
  core::store_element(k.data, k.dtype, 100 * k.step(2), std::nan(""));
  expect_oracle_means(c);
  const std::vector<double> lse = run_forward(c, "", 1).lse.values();
  EXPECT_TRUE(std::isfinite(lse[99]));
  EXPECT_TRUE(std::isnan(lse[100]));
}

// The fp16 in which 16-bit scores are compared ends at 65504: beyond it the choice may keep the far smaller score.
TEST_P(RestOnEveryTarget, APrunedScoreMayBeTheLargest) {
  Case c = plain_case(1, 4, {1, 2});
  c.heads = c.kv_heads = 1;
  c.dtype = DType::bf16;
  c.problem.grouping = Grouping::consecutive;
  c.problem.scale = 1.0;
  Numbers numbers{1};
  c.make(numbers, true);
  c.problem.scale = 1.0;
  const auto set_row = [](const TensorView& view, std::int64_t row, double value) {
    for (std::int64_t x = 0; x < view.extent(3); ++x) {
      core::store_element(view.data, view.dtype, row * view.step(2) + x, value);
    }
  };
  set_row(c.tensors[0].view, 0, 64);
  const double keys[] = {128, 256, 1, 2};
  for (std::int64_t j = 0; j < 4; ++j) set_row(c.tensors[1].view, j, keys[j]);
  const Reference oracle = reference_forward(c.problem);
  EXPECT_EQ(oracle.selection.at(0, 0), 1);  // a tie of the clamped keys
  EXPECT_NEAR(oracle.out[0], oracle.means[0], 1e-12);
  expect_oracle_means(c);
}

// Wherever nothing is pruned: the same bits.
TEST_P(RestOnEveryTarget, WithoutPrunedKeysItIsAsIfDropped) {
  Numbers numbers{7};
  Case c = plain_case(40, 60);
  c.make(numbers, false);
  c.problem.grouping = Grouping::interleaved;  // 60 keys of a block of 128: no group has more than two
  const Forward mean = run_forward(c, "", 2);
  c.problem.rest = Rest::drop;
  const Forward drop = run_forward(c, "", 2);
  EXPECT_EQ(mean.out.memory, drop.out.memory);
  EXPECT_EQ(mean.lse.memory, drop.lse.memory);
}

}  // namespace
}  // namespace dspattn::cpu
