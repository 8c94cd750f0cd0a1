// Infinities in K, V and dO stay in the gradients of the rows that see or keep the key, or that are given them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check/random.h"
#include "core/half.h"
#include "cuda/fused_rows.h"
#include "dspattn/attention.h"

namespace dspattn {
namespace {

constexpr std::int64_t kFewHeads = 2, kFewRows = 150, kFewKeys = 200;
constexpr std::int64_t kKey = 37, kColumn = 5;  // where K or V is infinite
constexpr std::int64_t kRow = 20;               // where dO is: it sees keys up to kRow + kFewKeys - kFewRows
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A tensor [1, heads, n, d] on the device and here.
struct OnDevice {
  DType dtype;
  std::int64_t n, d;
  std::vector<std::uint8_t> host;
  core::DeviceBuffer buffer;

  OnDevice(const Row& row, std::int64_t rows)
      : dtype(row.dtype),
        n(rows),
        d(row.dim),
        host(static_cast<std::size_t>(kFewHeads * n * d) * size_bytes(dtype)),
        buffer(gpu_memory(), host.size()) {}
  void set(std::int64_t head, std::int64_t i, std::int64_t column, double value) {
    core::store_element(host.data(), dtype, (head * n + i) * d + column, value);
  }
  TensorView view() const { return {buffer.data(), dtype, {1, kFewHeads, n, d}}; }
  std::vector<std::uint8_t> bytes(std::int64_t head, std::int64_t i) const {
    const auto size = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(d) * size_bytes(dtype));
    const auto begin = host.begin() + (head * n + i) * size;
    return {begin, begin + size};
  }
  bool all(std::int64_t head, std::int64_t i, bool (*holds)(double)) const {
    for (std::int64_t c = 0; c < d; ++c) {
      if (!holds(core::load_element(host.data(), dtype, (head * n + i) * d + c))) return false;
    }
    return true;
  }
};

bool is_nan(double value) { return std::isnan(value); }
bool is_finite(double value) { return std::isfinite(value); }

struct Gradients {
  OnDevice out, d_q, d_k, d_v;
};

class NonFinite : public Robust {
 protected:
  Gradients run(double v_value, double d_out_value, double k_value = 0) const {
    Row of = row();
    if (of.dtype == DType::f32) of.pattern = {1, 2};  // that of sparse products, in which a pruned V is not multiplied
    OnDevice q(of, kFewRows), k(of, kFewKeys), v(of, kFewKeys), d_out(of, kFewRows);
    check::Random random(4, 1);
    for (OnDevice* tensor : {&q, &k, &v, &d_out}) {
      for (std::int64_t i = 0; i < kFewHeads * tensor->n; ++i) {
        for (std::int64_t c = 0; c < tensor->d; ++c) {
          tensor->set(0, i, c, static_cast<double>(random.between(-8, 8)) / 8);
        }
      }
    }
    for (std::int64_t head = 0; head < kFewHeads; ++head) {
      k.set(head, kKey, kColumn, k_value);
      v.set(head, kKey, kColumn, v_value);
      d_out.set(head, kRow, kColumn, d_out_value);
    }
    for (OnDevice* tensor : {&q, &k, &v, &d_out}) tensor->buffer.upload(tensor->host.data());

    Gradients found{OnDevice(of, kFewRows), OnDevice(of, kFewRows), OnDevice(of, kFewKeys), OnDevice(of, kFewKeys)};
    const core::DeviceBuffer lse(gpu_memory(), kFewHeads * kFewRows * sizeof(float));
    ForwardArgs args;
    args.problem.device = kGpu;
    args.problem.q = q.view();
    args.problem.k = k.view();
    args.problem.v = v.view();
    args.problem.pattern = of.pattern;
    args.problem.mask.causal = true;
    args.out = found.out.view();
    args.lse = {lse.data(), DType::f32, {1, kFewHeads, kFewRows}};
    if (of.name.starts_with("general")) args.run.kernel = of.name;
    run_prepared(args);
    BackwardArgs gradients;
    gradients.problem = args.problem;
    gradients.out = args.out;
    gradients.lse = args.lse;
    gradients.d_out = d_out.view();
    gradients.d_q = found.d_q.view();
    gradients.d_k = found.d_k.view();
    gradients.d_v = found.d_v.view();
    gradients.run.kernel = of.name;
    run_prepared(gradients);
    for (OnDevice* tensor : {&found.out, &found.d_q, &found.d_k, &found.d_v}) {
      tensor->buffer.download(tensor->host.data());
    }
    return found;
  }

  template <typename Args>
  static void run_prepared(const Args& args) {
    Prepared<Args> call(args);
    const core::DeviceBuffer workspace(gpu_memory(), std::max<std::size_t>(call.workspace_bytes(), 1));
    call.run(workspace.data(), workspace.bytes());
  }
};

TEST_P(NonFinite, AnInfiniteValueStaysWithTheRowsThatKeepIt) {
  const Gradients usual = run(0, 0), found = run(kInfinity, 0);
  int kept = 0, pruned = 0;
  for (std::int64_t head = 0; head < kFewHeads; ++head) {
    for (std::int64_t i = 0; i < kFewRows; ++i) {
      const bool keeps = !found.out.all(head, i, is_finite);
      const bool sees = kKey <= i + kFewKeys - kFewRows;
      EXPECT_TRUE(sees || !keeps) << "row " << i;
      kept += keeps ? 1 : 0;
      pruned += sees && !keeps ? 1 : 0;
      if (keeps) {
        EXPECT_TRUE(found.d_q.all(head, i, is_nan)) << "row " << i;
      } else {
        EXPECT_EQ(found.d_q.bytes(head, i), usual.d_q.bytes(head, i)) << "row " << i;
      }
    }
  }
  EXPECT_GT(kept, 10);
  EXPECT_GT(pruned, 10);
}

TEST_P(NonFinite, AnInfiniteGradientStaysInItsRowAndTheKeysItSees) {
  const Gradients usual = run(0, 0), found = run(0, kInfinity);
  for (std::int64_t head = 0; head < kFewHeads; ++head) {
    for (std::int64_t i = 0; i < kFewRows; ++i) {
      if (i == kRow) {
        EXPECT_TRUE(found.d_q.all(head, i, is_nan));
      } else {
        EXPECT_EQ(found.d_q.bytes(head, i), usual.d_q.bytes(head, i)) << "row " << i;
      }
    }
    for (std::int64_t j = kRow + kFewKeys - kFewRows + 1; j < kFewKeys; ++j) {
      EXPECT_EQ(found.d_k.bytes(head, j), usual.d_k.bytes(head, j)) << "key " << j;
      EXPECT_EQ(found.d_v.bytes(head, j), usual.d_v.bytes(head, j)) << "key " << j;
    }
  }
}

// A score of -inf is masked; one of +inf, and 0 times infinity, make their row NaN.
TEST_P(NonFinite, AnInfiniteKeyStaysWithTheRowsThatItMakesNan) {
  const Gradients found = run(0, 0, kInfinity);
  int nan = 0, finite = 0;
  for (std::int64_t head = 0; head < kFewHeads; ++head) {
    for (std::int64_t i = 0; i < kFewRows; ++i) {
      const bool defined = found.out.all(head, i, is_finite);
      (defined ? finite : nan) += kKey <= i + kFewKeys - kFewRows ? 1 : 0;
      EXPECT_TRUE(found.d_q.all(head, i, defined ? is_finite : is_nan)) << "row " << i;
    }
  }
  EXPECT_GT(nan, 10);
  EXPECT_GT(finite, 10);
}

INSTANTIATE_TEST_SUITE_P(Rows, NonFinite,
                         ::testing::Values("general_bf16", "general_fp32", "sm90_fused_backward_2_4_bf16_d64",
                                           "sm90_fused_backward_1_2_fp16_d128"),
                         [](const auto& row) { return row.param; });

}  // namespace
}  // namespace dspattn
