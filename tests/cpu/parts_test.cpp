// Attention over parts of the keys, each with its own mask offset and fp32 results, merged: the whole's result.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "core/half.h"
#include "cpu/fast_case.h"
#include "cpu/reference.h"
#include "dspattn/error.h"
#include "dspattn/merge.h"

namespace dspattn::cpu {
namespace {

using namespace test;

// Keys [begin, end) of a problem, its diagonal where it was.
struct Part {
  Problem problem;
  std::vector<std::int32_t> key_lengths;
  std::int64_t begin = 0, end = 0;

  Part(const Case& c, std::int64_t first, std::int64_t last) : problem(c.problem), begin(first), end(last) {
    const auto cut = [&](ConstTensorView& view, int dim) {
      if (!view.present() || view.extent(dim) == 1) return;
      view.shape[static_cast<std::size_t>(dim)] = end - begin;
      view.data = static_cast<const std::uint8_t*>(view.data) +
                  begin * view.step(dim) * static_cast<std::int64_t>(size_bytes(view.dtype));
    };
    cut(problem.k, 2);  // of two keys or more
    cut(problem.v, 2);
    Mask& mask = problem.mask;
    mask.offset += (mask.alignment == Alignment::bottom_right ? c.n_k - c.n_q : 0) - begin;
    mask.alignment = Alignment::top_left;
    cut(mask.allowed, 3);
    cut(mask.bias, 3);
    for (const std::int32_t length : c.key_lengths) {
      key_lengths.push_back(
          std::clamp(length - static_cast<std::int32_t>(begin), 0, static_cast<std::int32_t>(end - begin)));
    }
    if (!key_lengths.empty()) mask.key_lengths.data = key_lengths.data();
  }
};

std::vector<Part> parts_of(const Case& c, std::int64_t blocks) {
  const std::int64_t unit = c.problem.grouping == Grouping::interleaved ? kInterleaveBlock : c.problem.pattern.group;
  std::vector<Part> parts;
  for (std::int64_t begin = 0; begin < c.n_k; begin += blocks * unit) {
    parts.emplace_back(c, begin, std::min(c.n_k, begin + blocks * unit));
  }
  return parts;
}

Tensor fp32_like_q(const Case& c, std::int64_t width) {
  return Tensor(DType::f32, c.outer(), c.heads, c.n_q, width, false, 0);
}
TensorView lse_view(const Case& c, const Tensor& lse) {
  return {lse.view.data, DType::f32, {c.outer(), c.heads, c.n_q}};
}

Forward merged_forward(const Case& c, const std::vector<Part>& parts) {
  std::vector<Forward> results;
  std::vector<Partial> partials;
  results.reserve(parts.size());
  for (const Part& part : parts) {
    results.push_back({fp32_like_q(c, c.d_v), fp32_like_q(c, 1)});
    ForwardArgs args;
    args.problem = part.problem;
    args.out = results.back().out.view;
    args.lse = lse_view(c, results.back().lse);
    args.run.threads = 1;
    forward(args);
    partials.push_back({args.out, args.lse});
  }
  Forward merged{fp32_like_q(c, c.d_v), fp32_like_q(c, 1)};
  merge(partials, merged.out.view, lse_view(c, merged.lse));
  return merged;
}

void expect_near(const std::vector<double>& ours, const std::vector<double>& wanted, double relative,
                 const char* what) {
  ASSERT_EQ(ours.size(), wanted.size()) << what;
  double largest = 0;
  for (const double value : wanted) largest = std::isfinite(value) ? std::max(largest, std::abs(value)) : largest;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (std::isinf(wanted[i])) {
      ASSERT_EQ(ours[i], wanted[i]) << what << " at " << i;
    } else {
      ASSERT_NEAR(ours[i], wanted[i], relative * (largest + 1e-3)) << what << " at " << i;
    }
  }
}

// Small integers (fast_case.h): the parts' selection is the whole's to the last tie.
void expect_parts_make_the_whole(Case& c, std::int64_t blocks, double relative, const char* kernel = "") {
  SCOPED_TRACE(c.text + " offset " + std::to_string(c.problem.mask.offset) + " blocks " + std::to_string(blocks));
  const std::vector<Part> parts = parts_of(c, blocks);
  const Reference whole = reference_forward(c.problem);
  const Forward merged = merged_forward(c, parts);
  expect_near(merged.out.values(), whole.out, relative, "out");
  expect_near(merged.lse.values(), whole.lse, relative, "lse");

  const Tensor d_out = random_d_out(c);
  const Gradients wanted = reference_backward(c.problem, d_out.view);
  std::vector<double> d_q(wanted.d_q.size(), 0.0);
  for (const Part& part : parts) {
    Tensor part_d_q = fp32_like_q(c, c.d);
    const std::int64_t keys = part.end - part.begin;
    Tensor d_k(DType::f32, c.batch, c.kv_heads, keys, c.d, false, 0);
    Tensor d_v(DType::f32, c.batch, c.kv_heads, keys, c.d_v, false, 0);
    BackwardArgs args;
    args.problem = part.problem;
    args.out = merged.out.view;
    args.lse = lse_view(c, merged.lse);
    args.d_out = d_out.view;
    args.d_q = part_d_q.view;
    args.d_k = d_k.view;
    args.d_v = d_v.view;
    args.run.threads = 1;
    args.run.kernel = kernel;
    backward(args);
    const std::vector<double> values = part_d_q.values();
    ASSERT_EQ(values.size(), d_q.size());
    double* sum = d_q.data();  // iterators take, without optimisation, several times as long
    for (const double *value = values.data(), *end = value + values.size(); value < end; ++value) *sum++ += *value;
    const auto rows = [&](const std::vector<double>& all, std::int64_t width) {
      std::vector<double> list;
      for (std::int64_t outer = 0; outer < c.batch * c.kv_heads; ++outer) {
        const auto from = all.begin() + (outer * c.n_k + part.begin) * width;
        list.insert(list.end(), from, from + keys * width);
      }
      return list;
    };
    expect_near(d_k.values(), rows(wanted.d_k, c.d), relative, "d_k");
    expect_near(d_v.values(), rows(wanted.d_v, c.d_v), relative, "d_v");
  }
  expect_near(d_q, wanted.d_q, relative, "d_q");
}

TEST(Parts, MergeToTheWholesResultAndGradients) {
  int tried = 0;
  for (std::uint64_t seed = 1; tried < 60; ++seed) {
    Case c = random_case(seed);
    if (!c.cu_q.empty() || c.n_k < 2) continue;
    ++tried;
    Numbers numbers{seed};
    if (numbers.chance(50)) c.problem.mask.offset = numbers.below(100) - 50;
    const std::int64_t blocks = 1 + numbers.below(2);
    expect_parts_make_the_whole(c, blocks, 2e-5);
    if (tried <= 12) expect_parts_make_the_whole(c, blocks, 2e-5, "cpu_reference");
  }
}

// Where fp32 cannot hold the LSE's last digits, backward finds the sums anew: of the part, which is not the row.
TEST(Parts, MergeWithScoresOfTenThousands) {
  Case c;
  c.heads = c.kv_heads = 2;
  c.n_q = 40;
  c.n_k = 300;
  c.d = c.d_v = 16;
  Numbers numbers{3};
  c.make(numbers, true);
  std::vector<float> bias(1, 20000.0f);
  c.problem.mask.bias = {bias.data(), DType::f32, {1, 1, 1, 1}};
  expect_parts_make_the_whole(c, 1, 4e-3);
}

// Nothing but the type of the result differs.
TEST(Parts, Fp32ResultsOfSixteenBitInputsAreThoseOfTheWidenedInputs) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Case narrow, wide;
    for (Case* c : {&narrow, &wide}) {
      c->heads = 4;
      c->kv_heads = 2;
      c->n_q = 37;
      c->n_k = 150;
      c->d = 24;
      c->d_v = 40;
      c->problem.pattern = Pattern::dense();
      c->problem.mask.causal = true;
    }
    narrow.dtype = dtype;
    Numbers numbers{11};
    narrow.make(numbers, false);
    for (const Tensor& tensor : narrow.tensors) {
      Tensor copy(DType::f32, tensor.view.extent(0), tensor.view.extent(1), tensor.view.extent(2),
                  tensor.view.extent(3), false, 0);
      const std::vector<double> values = tensor.values();
      std::size_t i = 0;
      copy.fill([&] { return values[i++]; });
      wide.tensors.push_back(std::move(copy));
    }
    wide.problem.q = wide.tensors[0].view;
    wide.problem.k = wide.tensors[1].view;
    wide.problem.v = wide.tensors[2].view;
    const Forward expected = run_forward(wide, "", 1);
    Forward ours{fp32_like_q(narrow, narrow.d_v), fp32_like_q(narrow, 1)};
    ForwardArgs args;
    args.problem = narrow.problem;
    args.out = ours.out.view;
    args.lse = lse_view(narrow, ours.lse);
    forward(args);
    EXPECT_EQ(ours.out.values(), expected.out.values());
    EXPECT_EQ(ours.lse.values(), expected.lse.values());
  }
}

TEST(Merge, RowsWithoutKeysAndRowsThatAreNotNumbers) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  // Rows: none has a key; only the first has; NaN in one; both.
  std::vector<float> a{9, 1, 2, 1}, b{9, 9, 3, 5}, out(4);
  std::vector<float> lse_a{-inf, 0.5f, 0, 0}, lse_b{-inf, -inf, nan, std::log(3.0f)}, lse(4);
  const auto rows = [](std::vector<float>& v) { return TensorView(v.data(), DType::f32, {1, 1, 4, 1}); };
  const auto row = [](std::vector<float>& v) { return TensorView(v.data(), DType::f32, {1, 1, 4}); };
  const std::vector<Partial> parts{{rows(a), row(lse_a)}, {rows(b), row(lse_b)}};
  merge(parts, rows(out), row(lse));
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(lse[0], -inf);
  EXPECT_EQ(out[1], 1);
  EXPECT_EQ(lse[1], 0.5f);
  EXPECT_TRUE(std::isnan(out[2]) && std::isnan(lse[2]));
  EXPECT_FLOAT_EQ(out[3], 4);
  EXPECT_FLOAT_EQ(lse[3], std::log(4.0f));
  // In place, and into nothing.
  merge(parts, rows(a), row(lse_a));
  EXPECT_EQ(a[3], out[3]);
  EXPECT_EQ(lse_a[3], lse[3]);
  merge({}, rows(out));
  EXPECT_EQ(out, std::vector<float>(4, 0.0f));
}

TEST(Merge, SaysWhatIsWrong) {
  std::vector<float> a(8), lse(4);
  const Partial part{{a.data(), DType::f32, {1, 2, 2, 2}}, {lse.data(), DType::f32, {1, 2, 2}}};
  std::vector<float> out(8);
  const auto message = [&](const Partial& given, const TensorView& to) -> std::string {
    try {
      merge({&given, 1}, to);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(
      message(part, {out.data(), DType::f32, {1, 2, 1, 2}}).find("parts[0].out.shape: expected out's [1, 2, 1, 2]"),
      std::string::npos);
  EXPECT_NE(message(part, {out.data(), DType::i32, {1, 2, 2, 2}}).find("out.dtype: expected fp32, fp16 or bf16"),
            std::string::npos);
  EXPECT_NE(message(part, {a.data(), DType::f32, {1, 2, 2, 2}, {8, 2, 4, 1}}).find("parts[0].out"), std::string::npos);
}

}  // namespace
}  // namespace dspattn::cpu
