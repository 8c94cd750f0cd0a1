// The oracle against hand-computed cases, its own definition in the simplest form, and finite differences.
#include "cpu/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <vector>

#include "core/half.h"
#include "dspattn/kernels.h"

namespace dspattn::cpu {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// A stream of numbers in [-1, 1) that is the same everywhere.
struct Numbers {
  std::uint64_t state = 1;
  double next() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(state >> 40) / 8388608.0 - 1.0;
  }
};

// A contiguous problem with one typed buffer per tensor.
struct Owned {
  std::vector<std::uint8_t> q, k, v;
  Problem problem;

  Owned(DType dtype, std::int64_t batch, std::int64_t heads, std::int64_t kv_heads, std::int64_t n_q, std::int64_t n_k,
        std::int64_t d, std::int64_t d_v) {
    problem.q = make(q, dtype, {batch, heads, n_q, d});
    problem.k = make(k, dtype, {batch, kv_heads, n_k, d});
    problem.v = make(v, dtype, {batch, kv_heads, n_k, d_v});
  }
  static ConstTensorView make(std::vector<std::uint8_t>& memory, DType dtype,
                              std::initializer_list<std::int64_t> shape) {
    ConstTensorView view(nullptr, dtype, shape);
    memory.resize(static_cast<std::size_t>(view.elements()) * size_bytes(dtype));
    view.data = memory.data();
    return view;
  }
  static void fill(std::vector<std::uint8_t>& memory, DType dtype, const std::function<double(std::int64_t)>& value) {
    const auto count = static_cast<std::int64_t>(memory.size() / size_bytes(dtype));
    for (std::int64_t i = 0; i < count; ++i) core::store_element(memory.data(), dtype, i, value(i));
  }
  void randomise(std::uint64_t seed) {
    Numbers numbers{seed};
    for (auto* memory : {&q, &k, &v}) fill(*memory, problem.q.dtype, [&](std::int64_t) { return numbers.next(); });
  }
};

// One query whose scores are the given numbers: d = 1, q = 1, k = scores, scale = 1.
Owned with_scores(const std::vector<double>& scores, DType dtype = DType::f32) {
  Owned owned(dtype, 1, 1, 1, 1, static_cast<std::int64_t>(scores.size()), 1, 1);
  Owned::fill(owned.q, dtype, [](std::int64_t) { return 1.0; });
  Owned::fill(owned.k, dtype, [&](std::int64_t j) { return scores[static_cast<std::size_t>(j)]; });
  Owned::fill(owned.v, dtype, [](std::int64_t j) { return static_cast<double>(j + 1); });
  owned.problem.scale = 1.0;
  owned.problem.grouping = Grouping::consecutive;
  return owned;
}

std::set<std::int64_t> kept_keys(const Reference& reference, std::int64_t row = 0) {
  std::set<std::int64_t> keys;
  for (std::int64_t j = 0; j < reference.selection.columns; ++j) {
    if (reference.selection.at(row, j)) keys.insert(j);
  }
  return keys;
}

TEST(Reference, KeepsTheLargestOfEachGroupBySignedValue) {
  Owned owned = with_scores({-5, 1, -2, 3, /**/ -1, -2, -3, -4, /**/ 7});
  const Reference reference = reference_forward(owned.problem);
  EXPECT_EQ(kept_keys(reference), (std::set<std::int64_t>{1, 3, 4, 5, 8}));
  const double sum = std::exp(1) + std::exp(3) + std::exp(-1) + std::exp(-2) + std::exp(7);
  EXPECT_NEAR(reference.lse[0], std::log(sum), 1e-14);
  EXPECT_NEAR(reference.out[0],
              (2 * std::exp(1) + 4 * std::exp(3) + 5 * std::exp(-1) + 6 * std::exp(-2) + 9 * std::exp(7)) / sum, 1e-14);
  ASSERT_EQ(reference.choices.size(), 2u);  // the last group has one key: nothing to choose
  EXPECT_EQ(reference.choices[0].gap, 1 - -2);
  EXPECT_EQ(reference.choices[1].gap, -2 - -3);
}

TEST(Reference, TiesKeepTheLowerKey) {
  Owned owned = with_scores({2, 2, 2, 2, /**/ 0, 1, 0, 1});
  const Reference reference = reference_forward(owned.problem);
  EXPECT_EQ(kept_keys(reference), (std::set<std::int64_t>{0, 1, 5, 7}));
  EXPECT_EQ(reference.choices[0].gap, 0);
}

TEST(Reference, InterleavedGroupsAreAStrideApart) {
  // 1:2 over 128 keys pairs key r with key r + 64; over the next block of 72 keys, 128 + r with 192 + r.
  std::vector<double> scores(200);
  for (std::size_t j = 0; j < scores.size(); ++j) scores[j] = static_cast<double>((j * 37) % 200);
  Owned owned = with_scores(scores);
  owned.problem.pattern = {1, 2};
  owned.problem.grouping = Grouping::interleaved;
  owned.problem.scale = 0.01;
  const Reference reference = reference_forward(owned.problem);
  std::set<std::int64_t> expected;
  for (std::size_t r = 0; r < 64; ++r)
    expected.insert(static_cast<std::int64_t>(scores[r] > scores[r + 64] ? r : r + 64));
  for (std::size_t r = 128; r < 192; ++r) {
    const bool pair = r + 64 < 200;
    expected.insert(static_cast<std::int64_t>(pair && scores[r + 64] > scores[r] ? r + 64 : r));
  }
  EXPECT_EQ(kept_keys(reference), expected);
}

TEST(Reference, SixteenBitKeysAreRoundedToFp16AndTieThere) {
  // 2048 and 2049 are one fp16 apart from each other only after rounding: 2049 is not an fp16 number and ties with
  // 2048.
  Owned owned(DType::bf16, 1, 1, 1, 1, 2, 2, 1);
  Owned::fill(owned.q, DType::bf16, [](std::int64_t) { return 1.0; });
  const double k[] = {2048, 0, 2048, 1};
  Owned::fill(owned.k, DType::bf16, [&](std::int64_t i) { return k[i]; });
  Owned::fill(owned.v, DType::bf16, [](std::int64_t j) { return static_cast<double>(j + 1); });
  owned.problem.pattern = {1, 2};
  owned.problem.grouping = Grouping::consecutive;
  owned.problem.scale = 1.0;
  EXPECT_EQ(kept_keys(reference_forward(owned.problem)), (std::set<std::int64_t>{0}));
  owned.problem.scale = 1.99;  // still 2^-e = 1
  EXPECT_EQ(kept_keys(reference_forward(owned.problem)), (std::set<std::int64_t>{0}));
  // In fp32 it is no tie.
  Owned precise(DType::f32, 1, 1, 1, 1, 2, 2, 1);
  Owned::fill(precise.q, DType::f32, [](std::int64_t) { return 1.0; });
  Owned::fill(precise.k, DType::f32, [&](std::int64_t i) { return k[i]; });
  Owned::fill(precise.v, DType::f32, [](std::int64_t) { return 1.0; });
  precise.problem.pattern = {1, 2};
  precise.problem.grouping = Grouping::consecutive;
  EXPECT_EQ(kept_keys(reference_forward(precise.problem)), (std::set<std::int64_t>{1}));
}

TEST(Reference, SixteenBitKeysAreClampedNotMasked) {
  Owned owned = with_scores({1e30, 2e30, -1e30, -2e30}, DType::bf16);
  owned.problem.scale = 1.0;
  EXPECT_EQ(kept_keys(reference_forward(owned.problem)), (std::set<std::int64_t>{0, 1}));
  owned.problem.mask.window_left = 0;
  owned.problem.mask.window_right = 1;
  owned.problem.mask.alignment = Alignment::bottom_right;  // the query sits at key 3
  EXPECT_EQ(kept_keys(reference_forward(owned.problem)), (std::set<std::int64_t>{3}));
}

TEST(Reference, MaskedKeysTakeNoSlot) {
  Owned owned = with_scores({9, 8, 1, 2, 7, 3});
  const std::vector<std::uint8_t> allowed{0, 1, 1, 0, 0, 1};
  owned.problem.mask.allowed = {allowed.data(), DType::b8, {1, 1, 1, 6}};
  EXPECT_EQ(kept_keys(reference_forward(owned.problem)), (std::set<std::int64_t>{1, 2, 5}));
}

TEST(Reference, BiasIsAddedToTheScaledScoresAndMinusInfinityMasks) {
  Owned owned = with_scores({1, 2, 3, 4});
  owned.problem.scale = 0.5;
  const std::vector<float> bias{2, 0, 0, -std::numeric_limits<float>::infinity()};
  owned.problem.mask.bias = {bias.data(), DType::f32, {1, 1, 1, 4}};
  const Reference reference = reference_forward(owned.problem);
  EXPECT_EQ(kept_keys(reference), (std::set<std::int64_t>{0, 2}));  // T = 1+4, 2, 3, masked
  EXPECT_NEAR(reference.lse[0], std::log(std::exp(2.5) + std::exp(1.5)), 1e-14);
}

TEST(Reference, EmptyRowsGiveZeroAndMinusInfinity) {
  Owned owned(DType::f32, 1, 1, 1, 4, 2, 3, 3);
  owned.randomise(5);
  owned.problem.mask.causal = true;  // bottom right: the first two queries see nothing
  const Reference reference = reference_forward(owned.problem);
  EXPECT_EQ(reference.lse[0], -kInf);
  EXPECT_EQ(reference.lse[1], -kInf);
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(reference.out[i], 0.0);
  EXPECT_TRUE(std::isfinite(reference.lse[2]));
  std::vector<float> ones(12, 1.0f);
  const Gradients gradients = reference_backward(owned.problem, {ones.data(), DType::f32, {1, 1, 4, 3}});
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(gradients.d_q[i], 0.0);
  for (const double value : gradients.d_k) EXPECT_TRUE(std::isfinite(value));
}

TEST(Reference, NaNStaysInItsRowAndOnlyWhenVisible) {
  Owned owned(DType::f32, 1, 1, 1, 3, 3, 2, 2);
  owned.randomise(6);
  Owned::fill(owned.k, DType::f32, [](std::int64_t i) { return i >= 4 ? std::nan("") : 0.5; });  // key 2 is NaN
  owned.problem.mask.causal = true;
  const Reference reference = reference_forward(owned.problem);
  for (std::size_t row = 0; row < 2; ++row) {
    EXPECT_TRUE(std::isfinite(reference.lse[row]));
    EXPECT_TRUE(std::isfinite(reference.out[2 * row]));
  }
  EXPECT_TRUE(std::isnan(reference.lse[2]));
  EXPECT_TRUE(std::isnan(reference.out[4]) && std::isnan(reference.out[5]));
}

TEST(Reference, CausalDiagonalsAlign) {
  Owned owned(DType::f32, 1, 1, 1, 2, 4, 2, 2);
  owned.randomise(7);
  owned.problem.pattern = Pattern::dense();
  owned.problem.mask.causal = true;
  EXPECT_EQ(kept_keys(reference_forward(owned.problem), 0), (std::set<std::int64_t>{0, 1, 2}));
  owned.problem.mask.alignment = Alignment::top_left;
  EXPECT_EQ(kept_keys(reference_forward(owned.problem), 0), (std::set<std::int64_t>{0}));
  EXPECT_EQ(kept_keys(reference_forward(owned.problem), 1), (std::set<std::int64_t>{0, 1}));
  owned.problem.mask.causal = false;
  owned.problem.mask.window_left = 0;
  owned.problem.mask.window_right = 2;
  EXPECT_EQ(kept_keys(reference_forward(owned.problem), 1), (std::set<std::int64_t>{1, 2, 3}));
}

TEST(Reference, DenseOfAnySizeIsOrdinarySoftmaxAttention) {
  Owned owned(DType::f32, 2, 2, 1, 5, 7, 3, 4);
  owned.randomise(8);
  owned.problem.pattern = {3, 3};  // dense, in a size that no interleaved group could have
  const Reference reference = reference_forward(owned.problem);
  const auto* q = reinterpret_cast<const float*>(owned.q.data());
  const auto* k = reinterpret_cast<const float*>(owned.k.data());
  const auto* v = reinterpret_cast<const float*>(owned.v.data());
  for (int b = 0; b < 2; ++b) {
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < 5; ++i) {
        double sum = 0, out[4] = {};
        for (int j = 0; j < 7; ++j) {
          double dot = 0;
          for (int c = 0; c < 3; ++c) dot += double(q[((b * 2 + h) * 5 + i) * 3 + c]) * double(k[(b * 7 + j) * 3 + c]);
          const double weight = std::exp(dot / std::sqrt(3.0));
          sum += weight;
          for (int c = 0; c < 4; ++c) out[c] += weight * double(v[(b * 7 + j) * 4 + c]);
        }
        const auto row = static_cast<std::size_t>((b * 2 + h) * 5 + i);
        EXPECT_NEAR(reference.lse[row], std::log(sum), 1e-12);
        for (std::size_t c = 0; c < 4; ++c) EXPECT_NEAR(reference.out[row * 4 + c], out[c] / sum, 1e-12);
      }
    }
  }
}

TEST(Reference, PackedSequencesEqualTheirSeparateSelves) {
  Owned packed(DType::f32, 1, 2, 1, 12, 9, 4, 3);
  packed.randomise(9);
  const std::vector<std::int32_t> cu_q{0, 5, 5, 11}, cu_k{0, 2, 6, 9};
  packed.problem.packed = Packed{{cu_q.data(), DType::i32, {4}}, {cu_k.data(), DType::i32, {4}}, 6, 4};
  packed.problem.mask.causal = true;
  const Reference whole = reference_forward(packed.problem);
  for (std::size_t s = 0; s < 3; ++s) {
    Problem single = packed.problem;
    single.packed.reset();
    const std::int64_t n_q = cu_q[s + 1] - cu_q[s], n_k = cu_k[s + 1] - cu_k[s];
    single.q.data = packed.q.data() + cu_q[s] * 4 * 4;
    single.k.data = packed.k.data() + cu_k[s] * 4 * 4;
    single.v.data = packed.v.data() + cu_k[s] * 3 * 4;
    single.q.shape[2] = n_q;
    single.k.shape[2] = single.v.shape[2] = n_k;
    const Reference alone = reference_forward(single);
    for (std::int64_t h = 0; h < 2; ++h) {
      for (std::int64_t i = 0; i < n_q; ++i) {
        const auto in_whole = static_cast<std::size_t>(h * 12 + cu_q[s] + i);
        const auto in_alone = static_cast<std::size_t>(h * n_q + i);
        EXPECT_EQ(whole.lse[in_whole], alone.lse[in_alone]);
        for (std::size_t c = 0; c < 3; ++c) EXPECT_EQ(whole.out[in_whole * 3 + c], alone.out[in_alone * 3 + c]);
      }
    }
  }
}

TEST(Reference, AGivenSelectionIsUsedButMaskedKeysStayMasked) {
  Owned owned = with_scores({1, 2, 3, 4});
  owned.problem.mask.window_left = 2;  // the query sits at key 3 and does not see key 0
  Selection given(1, 4, 0);
  given.at(0, 0) = given.at(0, 1) = 1;
  const Reference reference = reference_forward(owned.problem, &given);
  EXPECT_EQ(kept_keys(reference), (std::set<std::int64_t>{1}));
  EXPECT_EQ(reference.lse[0], 2.0);
  EXPECT_EQ(reference.out[0], 2.0);
}

// sum(d_out * O) as a function of one input element, by central differences; skipped where a choice could turn.
TEST(Reference, GradientsAgreeWithFiniteDifferences) {
  struct Case {
    Pattern pattern;
    Grouping grouping;
    bool causal;
    std::int64_t heads, kv_heads, n_q, n_k, d, d_v;
  };
  const Case cases[] = {
      {{2, 4}, Grouping::consecutive, false, 2, 1, 5, 11, 3, 4},
      {{1, 2}, Grouping::interleaved, true, 2, 2, 4, 140, 2, 2},
      {{3, 5}, Grouping::consecutive, true, 4, 2, 7, 7, 4, 3},
      {Pattern::dense(), Grouping::interleaved, false, 1, 1, 3, 6, 2, 5},
  };
  // Inputs are fp32; a step of 2^-8 is exact in them near 1, and the central difference errs by its square.
  constexpr double kStep = 0x1p-8;
  for (const Case& c : cases) {
    Owned owned(DType::f32, 1, c.heads, c.kv_heads, c.n_q, c.n_k, c.d, c.d_v);
    owned.randomise(static_cast<std::uint64_t>(c.n_k));
    owned.problem.pattern = c.pattern;
    owned.problem.grouping = c.grouping;
    owned.problem.mask.causal = c.causal;
    Numbers numbers{77};
    std::vector<float> d_out(static_cast<std::size_t>(c.heads * c.n_q * c.d_v));
    for (float& value : d_out) value = static_cast<float>(numbers.next());
    const Gradients gradients =
        reference_backward(owned.problem, {d_out.data(), DType::f32, {1, c.heads, c.n_q, c.d_v}});
    const Reference base = reference_forward(owned.problem);
    const auto loss = [&](const Reference& reference) {
      double sum = 0;
      for (std::size_t i = 0; i < d_out.size(); ++i) sum += static_cast<double>(d_out[i]) * reference.out[i];
      return sum;
    };
    int compared = 0;
    for (auto [memory, gradient] : {std::pair{&owned.q, &gradients.d_q}, std::pair{&owned.k, &gradients.d_k},
                                    std::pair{&owned.v, &gradients.d_v}}) {
      for (std::size_t i = 0; i < gradient->size(); ++i) {
        const auto index = static_cast<std::int64_t>(i);
        const double original = core::load_element(memory->data(), DType::f32, index);
        core::store_element(memory->data(), DType::f32, index, original + kStep);
        const double up_input = core::load_element(memory->data(), DType::f32, index);
        const Reference up = reference_forward(owned.problem);
        core::store_element(memory->data(), DType::f32, index, original - kStep);
        const double down_input = core::load_element(memory->data(), DType::f32, index);
        const Reference down = reference_forward(owned.problem);
        core::store_element(memory->data(), DType::f32, index, original);
        if (up.selection.values != base.selection.values || down.selection.values != base.selection.values) continue;
        EXPECT_NEAR((*gradient)[i], (loss(up) - loss(down)) / (up_input - down_input), 3e-5) << i;
        ++compared;
      }
    }
    EXPECT_GT(compared, static_cast<int>(gradients.d_q.size() + gradients.d_k.size() + gradients.d_v.size()) / 2);
  }
}

// The same for what training adds: every gradient at once, of biases, sinks and inputs, with dropout, under a soft cap,
// of a loss that has a part in the LSE.
TEST(Reference, TrainingGradientsAreFiniteDifferences) {
  constexpr double kStep = 0x1p-8;
  Owned owned(DType::f32, 2, 4, 2, 3, 9, 3, 2);
  owned.randomise(31);
  owned.problem.grouping = Grouping::consecutive;
  owned.problem.dropout = {0.3, 3, 4, {}};
  owned.problem.soft_cap = 0.8;
  Numbers numbers{78};
  std::vector<std::uint8_t> bias, sinks, d_out, d_lse;
  owned.problem.mask.bias = Owned::make(bias, DType::f32, {1, 4, 3, 9});
  owned.problem.sinks = Owned::make(sinks, DType::f32, {4});
  const ConstTensorView d_out_view = Owned::make(d_out, DType::f32, {2, 4, 3, 2});
  const ConstTensorView d_lse_view = Owned::make(d_lse, DType::f32, {2, 4, 3});
  for (auto* memory : {&bias, &sinks, &d_out, &d_lse}) {
    Owned::fill(*memory, DType::f32, [&](std::int64_t) { return numbers.next(); });
  }
  const Gradients gradients = reference_backward(owned.problem, d_out_view, nullptr, d_lse_view);
  const Reference base = reference_forward(owned.problem);
  const auto loss = [&](const Reference& reference) {
    double sum = 0;
    for (std::size_t i = 0; i < reference.out.size(); ++i) {
      sum += core::load_element(d_out.data(), DType::f32, static_cast<std::int64_t>(i)) * reference.out[i];
    }
    for (std::size_t i = 0; i < reference.lse.size(); ++i) {
      sum += core::load_element(d_lse.data(), DType::f32, static_cast<std::int64_t>(i)) * reference.lse[i];
    }
    return sum;
  };
  for (auto [memory, gradient] :
       {std::pair{&owned.q, &gradients.d_q}, std::pair{&owned.k, &gradients.d_k}, std::pair{&owned.v, &gradients.d_v},
        std::pair{&bias, &gradients.d_bias}, std::pair{&sinks, &gradients.d_sinks}}) {
    ASSERT_EQ(gradient->size(), memory->size() / sizeof(float));
    std::size_t compared = 0, not_zero = 0;
    for (std::size_t i = 0; i < gradient->size(); ++i) {
      const auto index = static_cast<std::int64_t>(i);
      const double original = core::load_element(memory->data(), DType::f32, index);
      core::store_element(memory->data(), DType::f32, index, original + kStep);
      const double up_input = core::load_element(memory->data(), DType::f32, index);
      const Reference up = reference_forward(owned.problem);
      core::store_element(memory->data(), DType::f32, index, original - kStep);
      const double down_input = core::load_element(memory->data(), DType::f32, index);
      const Reference down = reference_forward(owned.problem);
      core::store_element(memory->data(), DType::f32, index, original);
      if (up.selection.values != base.selection.values || down.selection.values != base.selection.values) continue;
      EXPECT_NEAR((*gradient)[i], (loss(up) - loss(down)) / (up_input - down_input), 5e-5) << i;
      ++compared;
      not_zero += std::abs((*gradient)[i]) > 1e-3;
    }
    EXPECT_GT(2 * compared, gradient->size());
    EXPECT_GT(3 * not_zero, gradient->size());
  }
}

TEST(Reference, IsARowOfTheKernelTable) {
  Owned owned(DType::bf16, 2, 2, 1, 5, 9, 3, 4);
  owned.randomise(10);
  const Reference reference = reference_forward(owned.problem);
  std::vector<std::uint8_t> out, lse;
  ForwardArgs args;
  args.problem = owned.problem;
  args.run.kernel = "cpu_reference";
  const ConstTensorView out_view = Owned::make(out, DType::bf16, {2, 2, 5, 4});
  const ConstTensorView lse_view = Owned::make(lse, DType::f32, {2, 2, 5});
  args.out = TensorView(out.data(), DType::bf16, {2, 2, 5, 4});
  args.lse = TensorView(lse.data(), DType::f32, {2, 2, 5});
  forward(args);
  for (std::int64_t i = 0; i < out_view.elements(); ++i) {
    EXPECT_EQ(core::load_element(out.data(), DType::bf16, i),
              core::round_to(DType::bf16, reference.out[static_cast<std::size_t>(i)]));
  }
  for (std::int64_t i = 0; i < lse_view.elements(); ++i) {
    EXPECT_EQ(core::load_element(lse.data(), DType::f32, i),
              core::round_to(DType::f32, reference.lse[static_cast<std::size_t>(i)]));
  }
  EXPECT_EQ(kernels(Pass::backward).back().name, "cpu_reference");
}

}  // namespace
}  // namespace dspattn::cpu
