// Wrong calls of every kind: each gives an error that names the argument, what was expected and what was given, with
// nothing written.
#include "core/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/wrong_calls.h"
#include "dspattn/attention.h"

namespace dspattn {
namespace {

bool one_reason_has(const std::vector<std::string>& reasons, const std::vector<const char*>& words) {
  for (const std::string& reason : reasons) {
    bool all = reason.rfind(words[0], 0) == 0 && reason.find("expected") != std::string::npos;
    for (const char* word : words) all = all && reason.find(word) != std::string::npos;
    if (all) return true;
  }
  return false;
}

TEST(Validate, EveryWrongCallNamesArgumentExpectationAndValueAndWritesNothing) {
  int count = 0;
  for (const WrongCall& wrong : wrong_calls()) {
    SCOPED_TRACE(wrong.name);
    Call call;
    wrong.make_wrong(call);
    if (wrong.passes != WrongCall::only_backward) {
      const Status status = try_forward(call.forward);
      EXPECT_TRUE(one_reason_has(status.reasons, wrong.words)) << status.message();
      EXPECT_THROW(forward(call.forward), Error);
      EXPECT_THROW(forward_workspace_bytes(call.forward), Error);
    }
    if (wrong.passes != WrongCall::only_forward) {
      const Status status = try_backward(call.backward);
      EXPECT_TRUE(one_reason_has(status.reasons, wrong.words)) << status.message();
      EXPECT_THROW(backward(call.backward), Error);
      EXPECT_THROW(backward_workspace_bytes(call.backward), Error);
    }
    EXPECT_TRUE(call.outputs_untouched());
    ++count;
  }
  EXPECT_GE(count, 20);
}

TEST(Validate, TheCallsAreRightUntilBroken) {
  Call call;
  EXPECT_EQ(core::forward_reasons(call.forward), std::vector<std::string>{});
  EXPECT_EQ(core::backward_reasons(call.backward), std::vector<std::string>{});
  for (const double scale : {0x1p-126, 2e-8, 1e5, 0x1p126}) {
    call.forward.problem.scale = scale;
    EXPECT_EQ(core::forward_reasons(call.forward), std::vector<std::string>{}) << scale;
  }
  call.make_packed();
  EXPECT_EQ(core::forward_reasons(call.forward), std::vector<std::string>{});
  EXPECT_EQ(core::backward_reasons(call.backward), std::vector<std::string>{});
  call.forward.problem.packed->max_q = call.forward.problem.packed->max_k = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(core::forward_reasons(call.forward), std::vector<std::string>{});
}

TEST(Validate, AllReasonsAreCollected) {
  Call call;
  Problem& problem = call.forward.problem;
  problem.pattern = {3, 2};
  problem.scale = -1.0;
  problem.mask.window_left = -4;
  problem.mask.bias.shape[3] = 4;
  problem.v.dtype = DType::f16;
  call.forward.lse.dtype = DType::bf16;
  call.forward.run.threads = -1;
  const Status status = try_forward(call.forward);
  EXPECT_EQ(status.reasons.size(), 7u) << status.message();
}

TEST(Validate, EmptyTensorsNeedNoData) {
  for (int dim = 0; dim < 3; ++dim) {
    Call call;
    Problem problem = call.forward.problem;
    problem.mask = {};
    const std::int64_t batch = dim == 0 ? 0 : kBatch;
    const std::int64_t n_q = dim == 1 ? 0 : kQueries;
    const std::int64_t n_k = dim == 2 ? 0 : kKeys;
    problem.q = {dim < 2 ? nullptr : call.q.data(), DType::f32, {batch, kHeads, n_q, kDim}};
    problem.k = {dim != 1 ? nullptr : call.k.data(), DType::f32, {batch, kKvHeads, n_k, kDim}};
    problem.v = {dim != 1 ? nullptr : call.v.data(), DType::f32, {batch, kKvHeads, n_k, kDimV}};
    ForwardArgs args;
    args.problem = problem;
    args.out = {dim < 2 ? nullptr : call.out.data(), DType::f32, {batch, kHeads, n_q, kDimV}};
    EXPECT_EQ(core::forward_reasons(args), std::vector<std::string>{}) << dim;
  }
}

TEST(Validate, GradientsMayInterleaveInOneBuffer) {
  // [batch, n, heads + 2 kv_heads, d], as a model with one projection for q, k and v lays them out.
  constexpr std::int64_t n = 5, d = 8;
  Call call;
  const std::int64_t row = (kHeads + 2 * kKvHeads) * d;
  float* base = call.d_q.data();
  Problem problem = call.forward.problem;
  problem.mask = {};
  problem.q = {call.q.data(), DType::f32, {kBatch, kHeads, n, d}};
  problem.k = {call.k.data(), DType::f32, {kBatch, kKvHeads, n, d}};
  problem.v = {call.v.data(), DType::f32, {kBatch, kKvHeads, n, d}};
  BackwardArgs& args = call.backward;
  args.problem = problem;
  args.out = {call.forward_out.data(), DType::f32, {kBatch, kHeads, n, d}};
  args.lse = {call.forward_lse.data(), DType::f32, {kBatch, kHeads, n}};
  args.d_out = {call.d_out.data(), DType::f32, {kBatch, kHeads, n, d}};
  args.d_q = {base, DType::f32, {kBatch, kHeads, n, d}, {n * row, d, row, 1}};
  args.d_k = {base + kHeads * d, DType::f32, {kBatch, kKvHeads, n, d}, {n * row, d, row, 1}};
  args.d_v = {base + (kHeads + kKvHeads) * d, DType::f32, {kBatch, kKvHeads, n, d}, {n * row, d, row, 1}};
  EXPECT_EQ(core::backward_reasons(args), std::vector<std::string>{});
  args.d_k.data = base + (kHeads - 1) * d;  // the last query head's gradient
  EXPECT_EQ(core::backward_reasons(args).size(), 1u);
}

TEST(Validate, DeviceMemoryIsNotRead) {
  Call call;
  call.make_packed();
  Problem problem = call.forward.problem;
  problem.device = {DeviceType::cuda, 0};
  const void* unreadable = reinterpret_cast<const void*>(std::uintptr_t{4096});
  problem.packed->cu_q.data = problem.packed->cu_k.data = unreadable;
  problem.mask.key_lengths = {unreadable, DType::i32, {2}};
  EXPECT_EQ(core::problem_reasons(problem), std::vector<std::string>{});
}

}  // namespace
}  // namespace dspattn
