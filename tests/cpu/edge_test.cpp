// The CPU rows at the ends of what a call may hold: rows of no sequence, bounds, scales and biases of any size, numbers
// that are not finite, a caller's own floating-point environment.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/geometry.h"
#include "core/half.h"
#include "cpu/every_target.h"
#include "cpu/fast_case.h"
#include "cpu/reference.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace dspattn::cpu {
namespace {

using namespace test;

constexpr float kLargest = std::numeric_limits<float>::max();

class Edges : public EveryTarget {};
INSTANTIATE_TEST_SUITE_P(Cpu, Edges, testing::ValuesIn(targets()), target_name);

Case problem(DType dtype, std::int64_t n_q, std::int64_t n_k, std::int64_t d, bool integers) {
  Numbers numbers{static_cast<std::uint64_t>(17 * n_q + n_k + d)};
  Case c;
  c.dtype = dtype;
  c.n_q = n_q;
  c.n_k = n_k;
  c.d = c.d_v = d;
  c.make(numbers, integers);
  return c;
}

// Two sequences of 40 and 23 rows in tensors of 80 rows, the lengths every other entry of their memory.
struct Short {
  std::vector<std::int32_t> lengths{0, -7, 40, 99, 63};
  Case c;

  Short() {
    c.heads = 4;
    c.kv_heads = 2;
    c = with_rows(c);
    const ConstTensorView cumulative(lengths.data(), DType::i32, {3}, {2});
    c.problem.packed = Packed{cumulative, cumulative, 40, 40};
    c.problem.pattern = {2, 4};
  }
  static Case with_rows(Case c) {
    Numbers numbers{3};
    c.n_q = c.n_k = 80;
    c.d = c.d_v = 24;
    c.make(numbers, false);
    return c;
  }
};

TEST(EdgesOnce, RowsOfNoSequenceAreRowsWithoutKeys) {
  for (const std::string kernel : {"cpu_2_4", "cpu_any", "cpu_reference"}) {
    SCOPED_TRACE(kernel);
    const Short packed;
    const Case& c = packed.c;
    const Forward done = run_forward(c, kernel, 2);
    const Backward back = run_backward(c, done, random_d_out(c), kernel, 2);
    const auto row_of = [&](const Tensor& tensor, std::size_t i) {
      return static_cast<std::int64_t>(i) / tensor.view.extent(3) % tensor.view.extent(2);
    };
    for (const Tensor* tensor : {&done.out, &back.d_q, &back.d_k, &back.d_v}) {
      const std::vector<double> values = tensor->values();
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_TRUE(std::isfinite(values[i])) << i;
        if (row_of(*tensor, i) < 63) continue;
        ASSERT_EQ(values[i], 0.0) << i;
      }
    }
    const std::vector<double> lse = done.lse.values();
    for (std::size_t i = 0; i < lse.size(); ++i) EXPECT_EQ(lse[i] == -kInf, row_of(done.lse, i) >= 63) << i;
  }
}

TEST(EdgesOnce, AnyBoundOfPackedLengthsServes) {
  Short packed;
  const Forward expected = run_forward(packed.c, "", 2);
  const Tensor d_out = random_d_out(packed.c);
  const Backward expected_back = run_backward(packed.c, expected, d_out, "", 2);
  for (const std::int64_t bound :
       {std::int64_t{1} << 31, std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::max()}) {
    packed.c.problem.packed->max_q = packed.c.problem.packed->max_k = bound;
    const Forward done = run_forward(packed.c, "", 2);
    EXPECT_EQ(done.out.memory, expected.out.memory) << bound;
    const Backward back = run_backward(packed.c, done, d_out, "", 2);
    EXPECT_EQ(back.d_k.values(), expected_back.d_k.values()) << bound;
    EXPECT_EQ(back.d_q.values(), expected_back.d_q.values()) << bound;
  }
}

void expect_as_oracle(const Case& c, double lse_relative) {
  SCOPED_TRACE(c.text + " scale " + std::to_string(std::log2(c.problem.scale.value_or(1))));
  const Reference oracle = reference_forward(c.problem);
  const Forward ours = run_forward(c, "", 1);
  const double rounding = c.dtype == DType::f32 ? 0x1p-22 : c.dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
  expect_close(ours.out.values(), oracle.out, 4e-6, rounding, "out");
  std::vector<double> lse = oracle.lse;
  for (double& value : lse) {
    if (std::isfinite(value)) value = std::clamp(value, static_cast<double>(-kLargest), static_cast<double>(kLargest));
  }
  expect_close(ours.lse.values(), lse, 1e-5, lse_relative, "lse");
}

// Small integers and powers of two: every score is exact, and so is the choice, wherever the scale puts them.
TEST_P(Edges, EveryServedScaleServes) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}, Pattern::dense()}) {
      Case c = problem(dtype, 5, 70, 16, true);
      c.problem.pattern = pattern;
      for (const double scale : {core::kLeastScale, 2e-8, 0x1p-26, 1e5, 0x1p17, 1e30, core::kLargestScale}) {
        c.problem.scale = scale;
        expect_as_oracle(c, 1e-6);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Biases of every size up to the largest, of both signs, with scales that divide them out of fp32's range. Biases of
// one row are equal or far apart, so that every precision gives the same weights.
TEST_P(Edges, AFiniteBiasIsWorthItsSize) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const double scale : {0x1p-126, 0x1p-60, 0.125, 1.0, 8.0, 0x1p60}) {
      for (const bool positive : {false, true}) {
        for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}, Pattern::dense()}) {
          Case c = problem(dtype, 3, 40, 16, true);
          c.problem.pattern = pattern;
          c.problem.scale = scale;
          std::vector<float> bias(3 * 40);
          Numbers numbers{11};
          for (float& value : bias) {
            const float size = std::ldexp(kLargest, -static_cast<int>(numbers.below(4)));
            value = positive && numbers.chance(60) ? size : -size;
          }
          c.problem.mask.bias = {bias.data(), DType::f32, {1, 1, 3, 40}};
          expect_as_oracle(c, 1e-6);
          if (HasFatalFailure()) return;
          if (dtype != DType::f32 || scale < 0.1 || scale > 8) continue;
          const Tensor d_out = random_d_out(c);
          const Gradients oracle = reference_backward(c.problem, d_out.view);
          const Backward back = run_backward(c, run_forward(c, "", 1), d_out, "", 1);
          expect_close(back.d_q.values(), oracle.d_q, 1e-4, 1e-5, "d_q");
          expect_close(back.d_k.values(), oracle.d_k, 1e-4, 1e-5, "d_k");
          expect_close(back.d_v.values(), oracle.d_v, 1e-4, 1e-5, "d_v");
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// The sum of a finite product and a finite bias stays finite, where both are near the end of fp32's range.
TEST_P(Edges, AFiniteSumStaysFinite) {
  float q[1] = {1e19f}, k[4] = {2e19f, 1e19f, -2e19f, 0}, v[4] = {1, 2, 3, 4}, out[1], lse[1];
  for (const float size : {kLargest, -kLargest}) {
    float bias[4] = {size, size, size, size};
    ForwardArgs args;
    args.problem.q = {q, DType::f32, {1, 1, 1, 1}};
    args.problem.k = {k, DType::f32, {1, 1, 4, 1}};
    args.problem.v = {v, DType::f32, {1, 1, 4, 1}};
    args.problem.pattern = Pattern::dense();
    args.problem.scale = 1.0;
    args.problem.mask.bias = {bias, DType::f32, {1, 1, 1, 4}};
    args.out = {out, DType::f32, {1, 1, 1, 1}};
    args.lse = {lse, DType::f32, {1, 1, 1}};
    forward(args);
    EXPECT_TRUE(std::isfinite(out[0])) << size;
    EXPECT_TRUE(std::isfinite(lse[0])) << size;
    EXPECT_GE(out[0], 1.0f);
    EXPECT_LE(out[0], 4.0f);
  }
}

// An infinite or NaN key makes the rows that see it NaN, and a gradient scaler must learn of it: dQ of such a row is
// NaN, and so are dK and dV of every key that it sees. The gradients of the others are the oracle's.
TEST_P(Edges, ARowThatIsNanHasNanGradients) {
  for (const double poison : {static_cast<double>(kInf), std::nan("")}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const Pattern pattern : {Pattern{2, 4}, Pattern::dense(), Pattern{1, 8}}) {
        Case c = problem(dtype, 75, 75, 24, false);
        c.problem.pattern = pattern;
        c.problem.mask.causal = true;
        c.problem.mask.window_left = 30;
        const Tensor& k = c.tensors[1];
        core::store_element(k.view.data, dtype, 20 * k.view.step(2) + 3, poison);
        const Forward done = run_forward(c, "", 2);
        const Tensor d_out = random_d_out(c);
        const Gradients oracle = reference_backward(c.problem, d_out.view);
        const Backward back = run_backward(c, done, d_out, "", 2);
        const double slack = dtype == DType::f32 ? 1e-4 : 0.1;
        SCOPED_TRACE(c.text + (std::isnan(poison) ? " NaN" : " inf") + " " + to_string(pattern));
        expect_close(back.d_q.values(), oracle.d_q, slack, slack, "d_q");
        expect_close(back.d_k.values(), oracle.d_k, slack, slack, "d_k");
        expect_close(back.d_v.values(), oracle.d_v, slack, slack, "d_v");
        if (HasFatalFailure()) return;
        const std::vector<double> lse = done.lse.values(), d_q = back.d_q.values();
        int undefined = 0;
        for (std::size_t i = 0; i < lse.size(); ++i) {
          undefined += std::isnan(lse[i]);
          ASSERT_EQ(std::isnan(lse[i]), std::isnan(d_q[i * 24])) << i;
        }
        EXPECT_GT(undefined, 5);
        EXPECT_LT(undefined, 40);
      }
    }
  }
}

// Subnormal numbers are flushed on this thread for the lifetime of the object, as torch.set_flush_denormal does it.
class FlushSubnormals {
 public:
#if defined(__SSE2__)
  FlushSubnormals() : own_(_mm_getcsr()) { _mm_setcsr(own_ | 0x8040u); }
  ~FlushSubnormals() { _mm_setcsr(own_); }
  static bool flushing() { return (_mm_getcsr() & 0x8040u) == 0x8040u; }
#elif defined(__aarch64__)
  FlushSubnormals() : own_(control()) { set_control(own_ | kFlush); }
  ~FlushSubnormals() { set_control(own_); }
  static bool flushing() { return (control() & kFlush) != 0; }
#else
  static bool flushing() { return true; }
#endif

 private:
#if defined(__aarch64__)
  static constexpr std::uint64_t kFlush = std::uint64_t{1} << 24;
  static std::uint64_t control() {
    std::uint64_t value = 0;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set_control(std::uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
  std::uint64_t own_;
#elif defined(__SSE2__)
  unsigned own_;
#endif
};

TEST_P(Edges, BitsDoNotDependOnTheCallersFloatingPointEnvironment) {
  for (const std::string kernel : {"", "cpu_reference"}) {
    Numbers numbers{23};
    Case c;
    c.heads = c.kv_heads = 3;
    c.n_q = c.n_k = 90;
    c.d = c.d_v = 16;
    c.make(numbers, false);
    c.tensors[2].fill([&] { return numbers.real() * 0x1p-130; });  // every value is subnormal, and most results are
    Tensor d_out = random_d_out(c);
    d_out.fill([&] { return numbers.real() * 0x1p-128; });
    const Forward expected = run_forward(c, kernel, 1);
    const Backward expected_back = run_backward(c, expected, d_out, kernel, 1);
    for (const int threads : {1, 2, 5}) {
      const FlushSubnormals flush;
      const Forward done = run_forward(c, kernel, threads);
      EXPECT_EQ(done.out.memory, expected.out.memory) << threads;
      const Backward back = run_backward(c, done, d_out, kernel, threads);
      EXPECT_EQ(back.d_q.memory, expected_back.d_q.memory) << threads;
      EXPECT_EQ(back.d_v.memory, expected_back.d_v.memory) << threads;
      EXPECT_TRUE(FlushSubnormals::flushing()) << "the caller's own environment is to be left as it was";
    }
    const std::vector<double> out = expected.out.values();
    EXPECT_GT(std::count_if(out.begin(), out.end(), [](double x) { return x != 0 && std::abs(x) < 0x1p-126; }), 100);
  }
}

// fp16 holds infinity, NaN and subnormal numbers, and is rounded to nearest even: on every target.
TEST_P(Edges, EveryFp16NumberIsRead) {
  Case c = problem(DType::f16, 1, 4, 256, true);
  c.problem.pattern = Pattern::dense();
  c.tensors[0].fill([] { return 0.0; });  // the output is the mean of four equal rows of v
  for (std::uint32_t first = 0; first < 0x10000; first += 256) {
    std::uint32_t next = first;
    auto* v = static_cast<std::uint16_t*>(c.tensors[2].view.data);
    for (std::int64_t x = 0; x < 256; ++x, ++next) {
      for (std::int64_t key = 0; key < 4; ++key)
        v[key * c.tensors[2].view.step(2) + x] = static_cast<std::uint16_t>(next);
    }
    const std::vector<double> out = run_forward(c, "", 1).out.values();
    for (std::uint32_t x = 0; x < 256; ++x) {
      const double expected = core::decode_f16(static_cast<std::uint16_t>(first + x));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(out[x])) << first + x;
      } else {
        ASSERT_EQ(out[x], expected) << first + x;
      }
    }
  }
}

// The sum that is divided at the end leaves fp32's range; the mean of the kept values does not.
TEST_P(Edges, AMeanOfTheLargestValuesIsFinite) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Rest rest : {Rest::drop, Rest::mean}) {
      for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}, Pattern{3, 8}, Pattern::dense()}) {
        for (const std::int64_t n_k : {std::int64_t{5}, std::int64_t{70}, std::int64_t{300}}) {
          Case c = problem(dtype, 40, n_k, 80, true);
          c.problem.pattern = pattern;
          c.problem.rest = rest;
          const double largest = dtype == DType::f32 ? static_cast<double>(kLargest) : 0x1.fep127;
          c.tensors[2].fill([&] { return largest; });
          const Forward alike = run_forward(c, "", 1);
          for (const double value : alike.out.values()) ASSERT_NEAR(value, largest, 1e-6 * largest);
          EXPECT_EQ(run_forward(c, "", 5).out.memory, alike.out.memory);
          // Other columns keep the bits that they have by themselves, an infinite value stays so.
          const auto fill = [&](bool with_large) {
            Numbers again{7};
            std::int64_t at = 0;
            c.tensors[2].fill([&] {
              const double value = again.real(), place = static_cast<double>(at++ % 80);
              return place == 3 && with_large ? (2 + value) / 3 * largest : place == 4 && with_large ? kInf : value;
            });
          };
          fill(true);
          const std::vector<double> ours = run_forward(c, "", 1).out.values();
          expect_close(ours, reference_forward(c.problem).out, 4e-6, dtype == DType::f32 ? 4e-6 : 0x1p-8, "out");
          if (HasFatalFailure()) return;
          fill(false);
          const std::vector<double> small = run_forward(c, "", 1).out.values();
          for (std::size_t i = 0; i < ours.size(); ++i) {
            if (i % 80 == 3 || i % 80 == 4) continue;
            ASSERT_EQ(ours[i], small[i]) << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace dspattn::cpu
