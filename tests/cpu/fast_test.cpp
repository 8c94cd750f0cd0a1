// The fast CPU rows against the oracle, on every instruction set this machine runs.
//
// q and k hold small integers and the scale is a power of two, so every score is exact in fp32 and in the fp16
// selection key: the selection must be the oracle's to the last tie, and outputs differ by rounding alone. Bitwise
// comparisons (threads, reruns, neighbours in a batch) use ordinary reals.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/half.h"
#include "cpu/every_target.h"
#include "cpu/fast_case.h"
#include "cpu/reference.h"
#include "dspattn/kernels.h"

namespace dspattn::cpu {
namespace {

using namespace test;

// Half a unit in the last place of the type, relative.
double rounding(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-22; }

void expect_as_oracle(const Case& c, const std::string& kernel) {
  SCOPED_TRACE(kernel + ": " + c.text);
  const Reference oracle = reference_forward(c.problem);
  const Forward ours = run_forward(c, kernel, 2);
  expect_close(ours.out.values(), oracle.out, 4e-6, rounding(c.dtype), "out");
  expect_close(ours.lse.values(), oracle.lse, 4e-6, 1e-6, "lse");
  if (testing::Test::HasFatalFailure()) return;
  const Tensor d_out = random_d_out(c);
  const Gradients gradients = reference_backward(c.problem, d_out.view);
  const Backward ours_back = run_backward(c, ours, d_out, kernel, 2);
  // delta is made from the stored output, whose rounding reaches every gradient of the row: d_v terms of about 1/3
  // each, times weights that sum to one, times |k| <= 3 and the scale.
  const double stored = rounding(c.dtype) * std::sqrt(static_cast<double>(c.d_v)) * 0.5;
  const double rows = std::sqrt(static_cast<double>(c.n_q * (c.heads / c.kv_heads)) + 1.0);
  expect_close(ours_back.d_q.values(), gradients.d_q, 2e-5 + stored, rounding(c.dtype), "d_q");
  expect_close(ours_back.d_k.values(), gradients.d_k, (2e-5 + stored) * rows, rounding(c.dtype), "d_k");
  expect_close(ours_back.d_v.values(), gradients.d_v, 2e-5 * rows, rounding(c.dtype), "d_v");
}

std::string row_for(Pattern pattern) {
  return pattern == Pattern{2, 4}   ? "cpu_2_4"
         : pattern == Pattern{1, 2} ? "cpu_1_2"
         : pattern.is_dense()       ? "cpu_dense"
                                    : "cpu_any";
}

// Scalar code under a sanitizer takes minutes for what the others do in seconds: it gets a share of their problems.
// Which of two names Highway has for it depends on its version.
bool slow(std::int64_t target) { return kSanitized && (target == HWY_SCALAR || target == HWY_EMU128); }

INSTANTIATE_TEST_SUITE_P(Cpu, EveryTarget, testing::ValuesIn(targets()), target_name);

TEST_P(EveryTarget, RandomProblemsMatchTheOracle) {
  for (std::uint64_t seed = 0; seed < (slow(GetParam()) ? 8 : kSanitized ? 15 : 60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Case c = random_case(seed);
    expect_as_oracle(c, row_for(c.problem.pattern));
    if (HasFatalFailure()) return;
  }
}

// The general row must serve what the specialised ones serve, and choose alike.
TEST_P(EveryTarget, GeneralRowMatchesTheOracleOnSpecialPatterns) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    const Case c = random_case(1000 + seed);
    expect_as_oracle(c, "cpu_any");
    if (HasFatalFailure()) return;
  }
}

// Lengths around tiles, blocks and the groups' ends.
TEST_P(EveryTarget, LengthsAroundTileEdges) {
  std::uint64_t seed = 1;
  for (const std::int64_t n_q : {1, 31, 33, 129}) {
    for (const std::int64_t n_k : {1, 3, 127, 129, 257}) {
      for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}, Pattern{3, 7}}) {
        Numbers numbers{++seed};
        Case c;
        c.n_q = n_q;
        c.n_k = n_k;
        c.d = 20;
        c.d_v = 33;
        c.problem.pattern = pattern;
        c.problem.grouping = pattern.group == 7 || seed % 2 == 0 ? Grouping::consecutive : Grouping::interleaved;
        c.problem.mask.causal = seed % 3 == 0;
        c.make(numbers, true);
        expect_as_oracle(c, row_for(pattern));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A NaN in a key poisons the rows that see the key, whether or not they would keep it; NaN and infinity in the value of
// a key that is masked or pruned reach nothing.
TEST_P(EveryTarget, NanStaysInItsRows) {
  Numbers numbers{5};
  Case c;
  c.n_q = c.n_k = 160;
  c.d = c.d_v = 24;
  c.problem.mask.causal = true;
  c.make(numbers, true);
  const auto offset = [](const Tensor& t, std::int64_t row) { return row * t.view.step(2); };
  core::store_element(c.tensors[1].view.data, c.dtype, offset(c.tensors[1], 100), std::nan(""));
  for (std::int64_t x = 0; x < c.d_v; ++x) {
    core::store_element(c.tensors[2].view.data, c.dtype, offset(c.tensors[2], 90) + x, kInf);
    core::store_element(c.tensors[2].view.data, c.dtype, offset(c.tensors[2], 120) + x, std::nan(""));
  }
  const Reference oracle = reference_forward(c.problem);
  const Forward ours = run_forward(c, "cpu_2_4", 1);
  const std::vector<double> out = ours.out.values(), lse = ours.lse.values();
  int finite_past_90 = 0;
  for (std::int64_t i = 0; i < c.n_q; ++i) {
    const std::size_t row = static_cast<std::size_t>(i);
    EXPECT_EQ(std::isnan(lse[row]), i >= 100) << i;
    for (std::size_t x = 0; x < static_cast<std::size_t>(c.d_v); ++x) {
      const std::size_t at = row * static_cast<std::size_t>(c.d_v) + x;
      EXPECT_EQ(std::isnan(out[at]), std::isnan(oracle.out[at])) << i;
      EXPECT_EQ(std::isinf(out[at]), std::isinf(oracle.out[at])) << i;
      finite_past_90 += i >= 90 && i < 100 && std::isfinite(out[at]) ? 1 : 0;
    }
  }
  EXPECT_GT(finite_past_90, 0) << "some row should have pruned key 90";
}

// A finite bias masks nothing, however low (PyTorch users write finfo.min): such a row is the mean of its kept values.
TEST_P(EveryTarget, LowestFiniteBiasIsNoMask) {
  Numbers numbers{6};
  Case c;
  c.n_q = 2;
  c.n_k = 8;
  c.d = c.d_v = 8;
  c.problem.pattern = {2, 4};
  c.problem.grouping = Grouping::consecutive;
  c.make(numbers, true);
  std::vector<float> bias(8, std::numeric_limits<float>::lowest());
  c.problem.mask.bias = {bias.data(), DType::f32, {1, 1, 1, 8}};
  const Forward ours = run_forward(c, "cpu_2_4", 1);
  for (const double value : ours.out.values()) {
    EXPECT_TRUE(std::isfinite(value));
    EXPECT_NE(value, 0.0);
  }
  // The LSE of such a row is the bias: it has no room for the number of keys, and backward must not take it for one
  // key.
  const Tensor d_out = random_d_out(c);
  const Gradients gradients = reference_backward(c.problem, d_out.view);
  const Backward back = run_backward(c, ours, d_out, "cpu_2_4", 1);
  expect_close(back.d_q.values(), gradients.d_q, 2e-5, 0x1p-22, "d_q");
  expect_close(back.d_k.values(), gradients.d_k, 2e-5, 0x1p-22, "d_k");
  expect_close(back.d_v.values(), gradients.d_v, 2e-5, 0x1p-22, "d_v");
}

TEST_P(EveryTarget, BitsDoNotDependOnThreadsOrReruns) {
  for (const bool causal : {false, true}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Numbers numbers{7};
      Case c;
      c.batch = 1;
      c.heads = 6;
      c.kv_heads = 2;
      c.n_q = c.n_k = slow(GetParam()) ? 140 : 300;  // either way some rows and keys fill no tile
      c.d = 40;
      c.d_v = 72;
      c.dtype = dtype;
      c.problem.mask.causal = causal;
      c.make(numbers, false);
      const Tensor d_out = random_d_out(c);
      const Forward first = run_forward(c, "", 1);
      const Backward first_back = run_backward(c, first, d_out, "", 1);
      for (const int threads : {1, 2, 5, 0}) {
        const Forward again = run_forward(c, "", threads);
        EXPECT_EQ(first.out.memory, again.out.memory) << threads;
        EXPECT_EQ(first.lse.memory, again.lse.memory) << threads;
        const Backward back = run_backward(c, first, d_out, "", threads);
        EXPECT_EQ(first_back.d_q.memory, back.d_q.memory) << threads;
        EXPECT_EQ(first_back.d_k.memory, back.d_k.memory) << threads;
        EXPECT_EQ(first_back.d_v.memory, back.d_v.memory) << threads;
      }
    }
  }
}

// A row's bits are its own: the same sequence alone and inside a packed batch.
TEST(Fast, PackedSequenceHasTheBitsOfTheSequenceAlone) {
  Numbers numbers{8};
  Case whole;
  whole.heads = 2;
  whole.kv_heads = 1;
  whole.n_q = whole.n_k = 170;
  whole.d = whole.d_v = 32;
  whole.batch = 2;
  whole.cu_q = whole.cu_k = {0, 170, 233};
  whole.problem.packed = Packed{{whole.cu_q.data(), DType::i32, {3}}, {whole.cu_k.data(), DType::i32, {3}}, 170, 170};
  whole.problem.mask.causal = true;
  whole.make(numbers, false);
  Case alone = whole;
  alone.problem.packed.reset();
  alone.cu_q.clear();
  alone.cu_k.clear();
  alone.batch = 1;
  alone.n_q = alone.n_k = 63;
  for (ConstTensorView* view : {&alone.problem.q, &alone.problem.k, &alone.problem.v}) {
    view->data = static_cast<const float*>(view->data) + 170 * view->step(2);
    view->shape[2] = 63;
  }
  const std::vector<double> packed = run_forward(whole, "", 2).out.values();
  const std::vector<double> single = run_forward(alone, "", 1).out.values();
  for (std::size_t head = 0; head < 2; ++head) {
    for (std::size_t i = 0; i < 63 * 32; ++i) {
      ASSERT_EQ(packed[(head * 233 + 170) * 32 + i], single[head * 63 * 32 + i]);
    }
  }
}

TEST(Fast, MayBeCalledFromSeveralThreadsAtOnce) {
  Numbers numbers{9};
  Case c;
  c.heads = c.kv_heads = 4;
  c.n_q = c.n_k = 100;
  c.d = c.d_v = 16;
  c.make(numbers, false);
  const Forward expected = run_forward(c, "", 1);
  std::vector<std::thread> callers;
  std::vector<int> equal(4, 0);
  for (std::size_t caller = 0; caller < equal.size(); ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 20; ++i) equal[caller] += run_forward(c, "", 3).out.memory == expected.out.memory ? 1 : 0;
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int count : equal) EXPECT_EQ(count, 20);
}

// The chosen rows are the specialised ones, and each refuses what it is not for with a reason that names the pattern.
TEST(Fast, TableChoosesTheSpecialisedRow) {
  Numbers numbers{10};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}, Pattern::dense(), Pattern{3, 3}, Pattern{1, 4}}) {
      Case c;
      c.problem.pattern = pattern;
      c.problem.grouping = Grouping::consecutive;
      c.make(numbers, false);
      EXPECT_EQ(choose(c.problem, pass).name, row_for(pattern));
      for (const Verdict& verdict : consider(c.problem, pass)) {
        if (verdict.kernel.name != "cpu_1_2" || pattern == Pattern{1, 2}) continue;
        ASSERT_EQ(verdict.reasons.size(), 1u);
        EXPECT_EQ(verdict.reasons[0], "pattern: this kernel takes 1:2, got " + to_string(pattern));
      }
    }
  }
}

// No n^2 buffer: at n = 16384 the scores alone would take 1 GiB.
TEST(Fast, MemoryStaysNearInputsAndOutputs) {
  const auto resident_bytes = [] {
    long pages = 0, resident = 0;
    FILE* file = std::fopen("/proc/self/statm", "r");
    if (file == nullptr || std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = -1;
    if (file != nullptr) std::fclose(file);
    return resident * sysconf(_SC_PAGESIZE);
  };
  if (resident_bytes() < 0) GTEST_SKIP() << "no /proc/self/statm";
  if (kSanitized) GTEST_SKIP() << "the sanitizer's own memory would count";
  Numbers numbers{11};
  Case c;
  c.n_q = c.n_k = 16384;
  c.d = c.d_v = 64;
  c.problem.mask.window_left = 256;  // bounds the time, not the memory
  c.make(numbers, false);
  const long before = resident_bytes();
  const Forward result = run_forward(c, "", 2);
  const Tensor d_out = random_d_out(c);
  const Backward back = run_backward(c, result, d_out, "", 2);
  const long tensor_bytes = 16384 * 64 * 4;
  // Made since: out, lse, d_out and three gradients; 1.2 times that and of q, k, v, plus 64 MiB, less q, k, v.
  EXPECT_LT(resident_bytes() - before, static_cast<long>(1.2 * 8 * tensor_bytes) - 3 * tensor_bytes + (64L << 20));
}

}  // namespace
}  // namespace dspattn::cpu
