// The fast CPU rows against the oracle, on every instruction set this machine runs.
//
// q and k hold small integers and the scale is a power of two, so every score is exact in fp32 and in the fp16
// selection key: the selection must be the oracle's to the last tie, and outputs differ by rounding alone. Bitwise
// comparisons (threads, reruns, neighbours in a batch) use ordinary reals.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/half.h"
#include "cpu/reference.h"
#include "cpu/simd.h"
#include "dspattn/kernels.h"
#include "hwy/targets.h"

namespace dspattn::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Sanitizers hold memory of their own and slow the oracle down.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

struct Numbers {
  std::uint64_t state = 1;
  std::uint64_t bits() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return state >> 33;
  }
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(bound));
  }
  double real() { return static_cast<double>(bits()) / 1073741824.0 - 1.0; }
  bool chance(int percent) { return below(100) < percent; }
};

// Elements of one tensor, with or without gaps between rows, as [batch, heads, n, width] or [batch, n, heads, width].
struct Tensor {
  std::vector<std::uint8_t> memory;
  TensorView view;

  Tensor(DType dtype, std::int64_t batch, std::int64_t heads, std::int64_t n, std::int64_t width, bool heads_inside,
         std::int64_t gap) {
    view = TensorView(nullptr, dtype, {batch, heads, n, width});
    const std::int64_t row = width + gap;
    view.stride = heads_inside ? std::array<std::int64_t, 4>{n * heads * row, row, heads * row, 1}
                               : std::array<std::int64_t, 4>{heads * n * row, n * row, row, 1};
    // Poison shows reads and writes outside the rows; one spare element keeps empty tensors from being null.
    memory.assign(static_cast<std::size_t>(batch * heads * n * row + 1) * size_bytes(dtype), 0xff);
    view.data = memory.data();
  }
  template <typename Value>
  void fill(Value value) {
    for_each([&](std::int64_t offset) { core::store_element(view.data, view.dtype, offset, value()); });
  }
  std::vector<double> values() const {
    std::vector<double> list;
    for_each([&](std::int64_t offset) { list.push_back(core::load_element(view.data, view.dtype, offset)); });
    return list;
  }
  template <typename Visit>
  void for_each(Visit visit) const {
    for (std::int64_t b = 0; b < view.extent(0); ++b) {
      for (std::int64_t h = 0; h < view.extent(1); ++h) {
        for (std::int64_t i = 0; i < view.extent(2); ++i) {
          for (std::int64_t x = 0; x < view.extent(3); ++x) {
            visit(b * view.step(0) + h * view.step(1) + i * view.step(2) + x);
          }
        }
      }
    }
  }
};

// A problem with everything it points to.
struct Case {
  std::int64_t batch = 1, heads = 1, kv_heads = 1, n_q = 1, n_k = 1, d = 1, d_v = 1;
  DType dtype = DType::f32;
  std::vector<Tensor> tensors;
  std::vector<std::int32_t> cu_q, cu_k, key_lengths;
  std::vector<std::uint8_t> allowed, bias;
  Problem problem;
  std::string text;

  std::int64_t rows_q() const { return cu_q.empty() ? n_q : cu_q.back(); }
  std::int64_t rows_k() const { return cu_k.empty() ? n_k : cu_k.back(); }
  std::int64_t outer() const { return cu_q.empty() ? batch : 1; }
  Tensor like_q(std::int64_t width) const { return Tensor(dtype, outer(), heads, rows_q(), width, false, 3); }
  Tensor like_k(std::int64_t width) const { return Tensor(dtype, outer(), kv_heads, rows_k(), width, true, 0); }

  // Fills q, k, v once the sizes are set.
  void make(Numbers& numbers, bool integers) {
    const bool inside = numbers.chance(50);
    const std::int64_t gap = numbers.chance(50) ? numbers.below(5) : 0;
    tensors.emplace_back(dtype, outer(), heads, rows_q(), d, inside, gap);
    tensors.emplace_back(dtype, outer(), kv_heads, rows_k(), d, inside, gap);
    tensors.emplace_back(dtype, outer(), kv_heads, rows_k(), d_v, !inside, gap);
    const auto score_part = [&] { return integers ? static_cast<double>(numbers.below(7) - 3) : numbers.real(); };
    tensors[0].fill(score_part);
    tensors[1].fill(score_part);
    tensors[2].fill([&] { return numbers.real(); });
    problem.q = tensors[0].view;
    problem.k = tensors[1].view;
    problem.v = tensors[2].view;
    // A power of two, so that bias / scale is exact, near 1 / (sqrt(d) * size of an element).
    if (integers) problem.scale = std::exp2(-std::round(std::log2(4.0 * std::sqrt(static_cast<double>(d)))));
    text = "batch " + std::to_string(batch) + " heads " + std::to_string(heads) + "/" + std::to_string(kv_heads) +
           " n " + std::to_string(n_q) + "x" + std::to_string(n_k) + " d " + std::to_string(d) + "," +
           std::to_string(d_v) + " " + std::string(name(dtype)) + " " + to_string(problem.pattern) + " " +
           to_string(problem.grouping) + (cu_q.empty() ? "" : " packed") + (problem.mask.causal ? " causal" : "") +
           (problem.mask.window_left ? " left" : "") + (problem.mask.window_right ? " right" : "") +
           (key_lengths.empty() ? "" : " lengths") + (allowed.empty() ? "" : " allowed") +
           (bias.empty() ? "" : " bias");
  }
};

std::vector<std::int32_t> cumulative(Numbers& numbers, std::int64_t sequences, std::int64_t longest) {
  std::vector<std::int32_t> list{0};
  for (std::int64_t s = 0; s < sequences; ++s) {
    list.push_back(list.back() + static_cast<std::int32_t>(s == 0 ? longest : numbers.below(longest + 1)));
  }
  return list;
}

Case random_case(std::uint64_t seed) {
  Numbers numbers{seed * 7919 + 1};
  Case c;
  for (int warm = 0; warm < 8; ++warm) numbers.bits();
  constexpr DType kTypes[] = {DType::f32, DType::f32, DType::bf16, DType::f16};
  c.dtype = kTypes[numbers.below(4)];
  c.batch = numbers.below(3);
  c.kv_heads = 1 + numbers.below(2);
  c.heads = c.kv_heads * (1 + numbers.below(3));
  c.n_q = numbers.chance(10) ? numbers.below(3) : numbers.below(150);
  c.n_k = numbers.chance(10) ? numbers.below(3) : numbers.below(300);
  c.d = numbers.chance(50) ? 16 * (1 + numbers.below(8)) : 1 + numbers.below(256);
  c.d_v = numbers.chance(50) ? c.d : 1 + numbers.below(256);
  c.problem.grouping = numbers.chance(50) ? Grouping::consecutive : Grouping::interleaved;
  switch (numbers.below(5)) {
    case 0:
      c.problem.pattern = {1, 2};
      break;
    case 1:
      c.problem.pattern = Pattern::dense();
      break;
    case 2: {
      const int group = c.problem.grouping == Grouping::interleaved ? 1 << numbers.below(6)
                                                                    : static_cast<int>(1 + numbers.below(kMaxGroup));
      c.problem.pattern = {static_cast<int>(1 + numbers.below(group)), group};
      break;
    }
    default:
      c.problem.pattern = {2, 4};
  }
  if (numbers.chance(25) && c.batch > 0) {
    c.cu_q = cumulative(numbers, c.batch, c.n_q);
    c.cu_k = cumulative(numbers, c.batch, c.n_k);
    const std::int64_t entries = c.batch + 1;
    c.problem.packed =
        Packed{{c.cu_q.data(), DType::i32, {entries}}, {c.cu_k.data(), DType::i32, {entries}}, c.n_q, c.n_k};
  }
  Mask& mask = c.problem.mask;
  mask.causal = numbers.chance(35);
  if (numbers.chance(30)) mask.alignment = Alignment::top_left;
  if (numbers.chance(20)) mask.window_left = numbers.below(200);
  if (numbers.chance(15)) mask.window_right = numbers.below(40);
  if (numbers.chance(25) && c.cu_q.empty()) {
    for (std::int64_t b = 0; b < c.batch; ++b)
      c.key_lengths.push_back(static_cast<std::int32_t>(numbers.below(c.n_k + 1)));
    mask.key_lengths = {c.key_lengths.data(), DType::i32, {c.batch}};
  }
  const auto broadcast = [&](std::int64_t extent) { return numbers.chance(40) ? std::int64_t{1} : extent; };
  if (numbers.chance(25)) {
    mask.allowed = {nullptr, DType::b8, {broadcast(c.batch), broadcast(c.heads), broadcast(c.n_q), broadcast(c.n_k)}};
    c.allowed.resize(static_cast<std::size_t>(mask.allowed.elements()) + 1);
    for (auto& byte : c.allowed) byte = numbers.chance(70) ? 1 : 0;
    mask.allowed.data = c.allowed.data();
  }
  if (numbers.chance(25)) {
    const DType type = numbers.chance(50) ? DType::f32 : c.dtype;
    mask.bias = {nullptr, type, {broadcast(c.batch), broadcast(c.heads), broadcast(c.n_q), broadcast(c.n_k)}};
    c.bias.resize(static_cast<std::size_t>(mask.bias.elements() + 1) * size_bytes(type));
    mask.bias.data = c.bias.data();
    for (std::int64_t i = 0; i < mask.bias.elements(); ++i) {
      const double value = numbers.chance(20) ? -kInf : 0.25 * static_cast<double>(numbers.below(9) - 4);
      core::store_element(c.bias.data(), type, i, value);
    }
  }
  c.make(numbers, true);
  return c;
}

// A result may differ from the oracle's by rounding: of fp32 sums, and of the type it is stored in.
void expect_close(const std::vector<double>& ours, const std::vector<double>& oracle, double absolute, double relative,
                  const char* what) {
  ASSERT_EQ(ours.size(), oracle.size()) << what;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (std::isnan(oracle[i])) {
      ASSERT_TRUE(std::isnan(ours[i])) << what << " at " << i;
    } else if (std::isinf(oracle[i])) {
      ASSERT_EQ(ours[i], oracle[i]) << what << " at " << i;
    } else {
      ASSERT_NEAR(ours[i], oracle[i], absolute + relative * std::fabs(oracle[i])) << what << " at " << i;
    }
  }
}

struct Forward {
  Tensor out;
  Tensor lse;
};

Forward run_forward(const Case& c, const std::string& kernel, int threads) {
  Forward result{c.like_q(c.d_v), Tensor(DType::f32, c.outer(), c.heads, c.rows_q(), 1, false, 0)};
  ForwardArgs args;
  args.problem = c.problem;
  args.out = result.out.view;
  args.lse = TensorView(result.lse.view.data, DType::f32, {c.outer(), c.heads, c.rows_q()});
  args.run.kernel = kernel;
  args.run.threads = threads;
  forward(args);
  return result;
}

struct Backward {
  Tensor d_q, d_k, d_v;
};

Backward run_backward(const Case& c, const Forward& done, const Tensor& d_out, const std::string& kernel, int threads) {
  Backward result{c.like_q(c.d), c.like_k(c.d), c.like_k(c.d_v)};
  BackwardArgs args;
  args.problem = c.problem;
  args.out = done.out.view;
  args.lse = ConstTensorView(done.lse.view.data, DType::f32, {c.outer(), c.heads, c.rows_q()});
  args.d_out = d_out.view;
  args.d_q = result.d_q.view;
  args.d_k = result.d_k.view;
  args.d_v = result.d_v.view;
  args.run.kernel = kernel;
  args.run.threads = threads;
  backward(args);
  return result;
}

Tensor random_d_out(const Case& c) {
  Numbers numbers{99};
  Tensor d_out = c.like_q(c.d_v);
  d_out.fill([&] { return numbers.real(); });
  return d_out;
}

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

// Each instruction set the library is compiled for and this machine has.
class EveryTarget : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

// Scalar code under a sanitizer takes minutes for what the others do in seconds: it gets a share of their problems.
bool slow(std::int64_t target) { return kSanitized && target == HWY_SCALAR; }

std::vector<std::int64_t> targets() {
  std::vector<std::int64_t> list;
  const std::int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  for (int bit = 0; bit < 63; ++bit) {
    if (usable & (std::int64_t{1} << bit)) list.push_back(std::int64_t{1} << bit);
  }
  return list;
}

INSTANTIATE_TEST_SUITE_P(Cpu, EveryTarget, testing::ValuesIn(targets()),
                         [](const auto& target) { return std::string(hwy::TargetName(target.param)); });

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
