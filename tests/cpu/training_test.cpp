// What training asks of the CPU rows: dropout, soft caps, sinks, and the gradients of biases, of sinks and through the
// LSE. Against the oracle on every instruction set; bits where bits are promised.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "core/half.h"
#include "cpu/every_target.h"
#include "cpu/fast_case.h"
#include "cpu/reference.h"
#include "dspattn/attention.h"

namespace dspattn::cpu {
namespace {

using namespace test;

struct Results {
  std::vector<float> out, lse, d_q, d_k, d_v, d_bias, d_sinks;
};

// An fp32 problem [batch, heads, n, d] with everything that training may ask for.
struct Training {
  std::int64_t batch = 2, heads = 4, kv_heads = 2, n_q = 40, n_k = 150, d = 12, d_v = 10;
  std::vector<float> q, k, v, bias, sinks, d_out, d_lse;
  Problem problem;

  Training() {
    Numbers numbers{17};
    for (int i = 0; i < 8; ++i) numbers.bits();
    const auto fill = [&](std::vector<float>& values, std::int64_t count) {
      values.resize(static_cast<std::size_t>(count));
      for (float& value : values) value = static_cast<float>(2 * numbers.real());
    };
    fill(q, batch * heads * n_q * d);
    fill(k, batch * kv_heads * n_k * d);
    fill(v, batch * kv_heads * n_k * d_v);
    fill(d_out, batch * heads * n_q * d_v);
    fill(d_lse, batch * heads * n_q);
    fill(sinks, heads);
    problem.q = {q.data(), DType::f32, {batch, heads, n_q, d}};
    problem.k = {k.data(), DType::f32, {batch, kv_heads, n_k, d}};
    problem.v = {v.data(), DType::f32, {batch, kv_heads, n_k, d_v}};
  }
  void set_bias(std::array<std::int64_t, 4> shape) {
    Numbers numbers{23};
    problem.mask.bias = {nullptr, DType::f32, {shape[0], shape[1], shape[2], shape[3]}};
    bias.resize(static_cast<std::size_t>(problem.mask.bias.elements()));
    for (float& value : bias) value = static_cast<float>(numbers.real());
    problem.mask.bias.data = bias.data();
  }
  void set_sinks() { problem.sinks = {sinks.data(), DType::f32, {heads}}; }

  Results run(int threads = 2, const std::string& kernel = {}) const {
    Results r;
    const auto view = [](std::vector<float>& values, std::initializer_list<std::int64_t> shape) {
      TensorView made(nullptr, DType::f32, shape);
      values.assign(static_cast<std::size_t>(made.elements()), -1.0f);
      made.data = values.data();
      return made;
    };
    ForwardArgs forward_args;
    forward_args.problem = problem;
    forward_args.run.threads = threads;
    forward_args.run.kernel = kernel;
    forward_args.out = view(r.out, {batch, heads, n_q, d_v});
    forward_args.lse = view(r.lse, {batch, heads, n_q});
    forward(forward_args);
    BackwardArgs args;
    args.problem = problem;
    args.run.threads = threads;
    args.run.kernel = kernel;
    args.out = forward_args.out;
    args.lse = forward_args.lse;
    args.d_out = {d_out.data(), DType::f32, {batch, heads, n_q, d_v}};
    args.d_lse = {d_lse.data(), DType::f32, {batch, heads, n_q}};
    args.d_q = view(r.d_q, {batch, heads, n_q, d});
    args.d_k = view(r.d_k, {batch, kv_heads, n_k, d});
    args.d_v = view(r.d_v, {batch, kv_heads, n_k, d_v});
    const ConstTensorView& b = problem.mask.bias;
    if (b.present()) args.d_bias = view(r.d_bias, {b.extent(0), b.extent(1), b.extent(2), b.extent(3)});
    if (problem.sinks.present()) args.d_sinks = view(r.d_sinks, {heads});
    backward(args);
    return r;
  }
};

std::vector<double> doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

void expect_as_oracle(const Training& training, const std::string& what) {
  SCOPED_TRACE(what);
  const Results ours = training.run();
  const Reference oracle = reference_forward(training.problem);
  const Gradients gradients = reference_backward(
      training.problem,
      {training.d_out.data(), DType::f32, {training.batch, training.heads, training.n_q, training.d_v}}, nullptr,
      {training.d_lse.data(), DType::f32, {training.batch, training.heads, training.n_q}});
  expect_close(doubles(ours.out), oracle.out, 1e-5, 1e-5, "out");
  expect_close(doubles(ours.lse), oracle.lse, 1e-5, 1e-5, "lse");
  expect_close(doubles(ours.d_q), gradients.d_q, 1e-4, 1e-4, "d_q");
  expect_close(doubles(ours.d_k), gradients.d_k, 3e-4, 1e-4, "d_k");
  expect_close(doubles(ours.d_v), gradients.d_v, 3e-4, 1e-4, "d_v");
  expect_close(doubles(ours.d_bias), gradients.d_bias, 1e-3, 1e-4, "d_bias");
  expect_close(doubles(ours.d_sinks), gradients.d_sinks, 1e-3, 1e-4, "d_sinks");
}

TEST_P(EveryTarget, TrainingMatchesTheOracle) {
  for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}, Pattern::dense(), Pattern{3, 8}}) {
    Training training;
    training.problem.pattern = pattern;
    training.problem.mask.causal = pattern.keep == 1;
    expect_as_oracle(training, to_string(pattern) + " d_lse");
    training.problem.dropout = {0.3, 11, 12, {}};
    expect_as_oracle(training, to_string(pattern) + " dropout");
    training.problem.soft_cap = 1.5;
    expect_as_oracle(training, to_string(pattern) + " soft cap");
    training.set_sinks();
    expect_as_oracle(training, to_string(pattern) + " sinks");
    training.set_bias({1, training.heads, training.n_q, training.n_k});
    expect_as_oracle(training, to_string(pattern) + " bias");
    if (HasFatalFailure()) return;
  }
}

// Every way to broadcast a bias, with the heads of a group in one tile.
TEST(Training, BiasGradientsOfEveryBroadcast) {
  for (int ones = 0; ones < 16; ++ones) {
    Training training;
    const std::array<std::int64_t, 4> full{training.batch, training.heads, training.n_q, training.n_k};
    std::array<std::int64_t, 4> shape = full;
    for (std::size_t dim = 0; dim < 4; ++dim) {
      if ((ones >> dim & 1) != 0) shape[dim] = 1;
    }
    training.set_bias(shape);
    expect_as_oracle(training, "broadcast " + std::to_string(ones));
    const Results one = training.run(1), many = training.run(5);
    EXPECT_EQ(one.d_bias, many.d_bias) << ones;
  }
}

TEST(Training, ThreadsAndRerunsGiveTheSameBits) {
  Training training;
  training.problem.dropout = {0.2, 5, 6, {}};
  training.problem.soft_cap = 20;
  training.set_sinks();
  training.set_bias({1, 1, training.n_q, training.n_k});
  const Results first = training.run(1);
  for (const int threads : {1, 2, 5}) {
    const Results again = training.run(threads);
    EXPECT_EQ(first.out, again.out);
    EXPECT_EQ(first.lse, again.lse);
    EXPECT_EQ(first.d_q, again.d_q);
    EXPECT_EQ(first.d_k, again.d_k);
    EXPECT_EQ(first.d_v, again.d_v);
    EXPECT_EQ(first.d_bias, again.d_bias);
    EXPECT_EQ(first.d_sinks, again.d_sinks);
  }
}

TEST(Training, DropoutIsAFunctionOfSeedAndOffsetAndNotOfTheLse) {
  Training training;
  const Results without = training.run();
  training.problem.dropout = {0.4, 0x123456789abcdef0, 0xfedcba9876543210, {}};
  const Results numbers = training.run();
  EXPECT_EQ(without.lse, numbers.lse);
  EXPECT_NE(without.out, numbers.out);
  // The same numbers from memory, words in order; what the fields say is then not read.
  const std::uint32_t words[4] = {0x9abcdef0, 0x12345678, 0x76543210, 0xfedcba98};
  training.problem.dropout = {0.4, 1, 1, {words, DType::i32, {4}}};
  const Results state = training.run();
  EXPECT_EQ(numbers.out, state.out);
  EXPECT_EQ(numbers.d_q, state.d_q);
  training.problem.dropout = {0.4, 0x123456789abcdef0, 1, {}};
  EXPECT_NE(numbers.out, training.run().out);
  training.problem.dropout = {0.4, 1, 0xfedcba9876543210, {}};
  EXPECT_NE(numbers.out, training.run().out);
}

// With V of ones a row of the output is the sum of its weights: 1 on average, with the variance of dropped weights.
TEST(Training, DroppedWeightsKeepTheirMean) {
  Training training;
  std::fill(training.v.begin(), training.v.end(), 1.0f);
  for (const double p : {0.1, 0.5}) {
    double sum = 0, squares = 0;
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      training.problem.dropout = {p, seed, 0, {}};
      const Results results = training.run();
      for (std::size_t row = 0; row < results.lse.size(); ++row) {
        const double value = results.out[row * static_cast<std::size_t>(training.d_v)];
        sum += value;
        squares += (value - 1) * (value - 1);
      }
    }
    const double rows = 8.0 * static_cast<double>(training.batch * training.heads * training.n_q);
    const double deviation = std::sqrt(squares / rows);
    EXPECT_GT(deviation, 0.01) << p;
    EXPECT_NEAR(sum / rows, 1.0, 4.5 * deviation / std::sqrt(rows)) << p;
  }
}

// The choice is by the scores as they were: a soft cap that makes all of them nearly equal changes no selection.
TEST(Training, SoftCapsDoNotChoose) {
  Training training;
  const Reference without = reference_forward(training.problem);
  training.problem.soft_cap = 0.01;
  const Reference with = reference_forward(training.problem);
  EXPECT_EQ(without.selection.values, with.selection.values);
  EXPECT_NE(without.lse, with.lse);
  expect_as_oracle(training, "soft cap of 0.01");
  training.problem.soft_cap = 1e30;  // no cap at all
  expect_close(doubles(training.run().out), without.out, 1e-5, 1e-5, "out");
}

TEST(Training, ARowWithoutKeysHasItsSinkAlone) {
  Training training;
  training.set_sinks();
  const std::int32_t lengths[2] = {0, 3};
  training.problem.mask.key_lengths = {lengths, DType::i32, {2}};
  const Results results = training.run();
  for (std::int64_t h = 0; h < training.heads; ++h) {
    const auto row = static_cast<std::size_t>(h * training.n_q);
    EXPECT_EQ(results.lse[row], training.sinks[static_cast<std::size_t>(h)]);
    EXPECT_EQ(results.out[row * static_cast<std::size_t>(training.d_v)], 0.0f);
  }
  expect_as_oracle(training, "rows without keys");
  training.sinks[1] = std::numeric_limits<float>::infinity();
  const Results undefined = training.run();
  for (std::int64_t h = 0; h < training.heads; ++h) {
    EXPECT_EQ(std::isnan(undefined.lse[static_cast<std::size_t>(h * training.n_q)]), h == 1);
    EXPECT_EQ(std::isnan(undefined.d_sinks[static_cast<std::size_t>(h)]), h == 1);
  }
}

}  // namespace
}  // namespace dspattn::cpu
