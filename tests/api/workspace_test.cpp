// dspattn::Workspace: enough memory, aligned, kept between calls, and no more said about it than the call needs.
#include "dspattn/workspace.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "dspattn/pipeline.h"

namespace dspattn {
namespace {

// One head of n queries and keys, all values 1.
struct Problem1 {
  explicit Problem1(std::int64_t n) : q(static_cast<std::size_t>(n * 8), 0.5f), v(q.size(), 1.0f), out(q.size()) {
    args.problem.q = {q.data(), DType::f32, {1, 1, n, 8}};
    args.problem.k = {q.data(), DType::f32, {1, 1, n, 8}};
    args.problem.v = {v.data(), DType::f32, {1, 1, n, 8}};
    args.out = {out.data(), DType::f32, {1, 1, n, 8}};
  }
  std::vector<float> q, v, out;
  ForwardArgs args;
};

TEST(Workspace, IsAlignedAndLentToTheCall) {
  Execution run;
  Workspace workspace;
  workspace.attach(run, {}, 1000);
  EXPECT_GE(workspace.bytes(), 1000u);
  EXPECT_EQ(run.workspace, workspace.data());
  EXPECT_EQ(run.workspace_bytes, workspace.bytes());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(workspace.data()) % 256, 0u);
}

TEST(Workspace, GrowsAndIsKept) {
  Execution run;
  Workspace workspace;
  workspace.attach(run, {}, 1000);
  void* const first = run.workspace;
  workspace.attach(run, {}, 10);
  EXPECT_EQ(run.workspace, first);
  EXPECT_EQ(run.workspace_bytes, 1000u);
  workspace.attach(run, {}, 100'000);
  EXPECT_EQ(workspace.bytes(), 100'000u);
  EXPECT_EQ(run.workspace, workspace.data());
}

TEST(Workspace, ACallWithoutNeedGetsNone) {
  Execution run;
  Workspace workspace;
  workspace.attach(run, {}, 0);
  EXPECT_EQ(workspace.data(), nullptr);
  workspace.attach(run, {}, 512);
  workspace.attach(run, {}, 0);
  EXPECT_EQ(run.workspace, nullptr);
  EXPECT_EQ(run.workspace_bytes, 0u);
  EXPECT_EQ(workspace.bytes(), 512u);  // kept for the next
}

// What the arguments pointed to before may be freed, or be a tensor's by now.
TEST(Workspace, ForgetsTheOneBefore) {
  Problem1 problem(64);
  problem.args.run.workspace = problem.q.data();
  problem.args.run.workspace_bytes = 64;
  Workspace workspace;
  workspace.attach(problem.args);
  EXPECT_EQ(problem.args.run.workspace, workspace.data());
  forward(problem.args);
  EXPECT_EQ(problem.out, problem.v);
}

TEST(Workspace, ServesBackwardAndThePipeline) {
  Problem1 problem(64);
  std::vector<float> lse(64), d_q(problem.q.size()), d_k(d_q), d_v(d_q);
  problem.args.lse = {lse.data(), DType::f32, {1, 1, 64}};
  Workspace workspace;
  workspace.attach(problem.args);
  forward(problem.args);
  BackwardArgs backwards;
  backwards.problem = problem.args.problem;
  backwards.out = problem.args.out;
  backwards.lse = problem.args.lse;
  backwards.d_out = {problem.v.data(), DType::f32, {1, 1, 64, 8}};
  backwards.d_q = {d_q.data(), DType::f32, {1, 1, 64, 8}};
  backwards.d_k = {d_k.data(), DType::f32, {1, 1, 64, 8}};
  backwards.d_v = {d_v.data(), DType::f32, {1, 1, 64, 8}};
  workspace.attach(backwards);
  EXPECT_GE(workspace.bytes(), backward_workspace_bytes(backwards));
  EXPECT_GE(backwards.run.workspace_bytes, backward_workspace_bytes(backwards));
  backward(backwards);

  problem.args.problem.pattern = {1, 2};
  problem.args.problem.grouping = Grouping::consecutive;
  workspace.attach(problem.args.run, problem.args.problem.device, pipeline_workspace_bytes(problem.args));
  ASSERT_GT(workspace.bytes(), 0u);
  pipeline_forward(problem.args);
  EXPECT_EQ(problem.out, problem.v);
}

TEST(Workspace, MovesWithItsMemory) {
  Execution run;
  Workspace first;
  first.attach(run, {}, 1000);
  Workspace second(std::move(first));
  EXPECT_EQ(second.data(), run.workspace);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT: what is left of a moved one is part of the interface
  Workspace third;
  third.attach(run, {}, 2000);
  third = std::move(second);
  EXPECT_EQ(third.bytes(), 1000u);
}

// Whatever stops the call stops here, before memory is taken.
TEST(Workspace, RaisesAsTheCallWould) {
  Problem1 problem(64);
  problem.args.problem.scale = -1.0;
  Workspace workspace;
  EXPECT_THROW(workspace.attach(problem.args), Error);
  EXPECT_EQ(workspace.data(), nullptr);
  EXPECT_EQ(problem.args.run.workspace, nullptr);
}

TEST(Workspace, SizesThatNoMemoryHasAreNone) {
  Execution run;
  Workspace workspace;
  EXPECT_THROW(workspace.attach(run, {}, std::numeric_limits<std::size_t>::max()), std::bad_alloc);
  EXPECT_EQ(run.workspace, nullptr);
  workspace.attach(run, {}, 1000);
  EXPECT_EQ(workspace.bytes(), 1000u);
}

TEST(Workspace, NamesADeviceThatIsNotThere) {
  Execution run;
  Workspace workspace;
  workspace.attach(run, {}, 1000);
  EXPECT_THROW(workspace.attach(run, {DeviceType::cuda, 4711}, 1000), Error);
  EXPECT_EQ(run.workspace, nullptr);
}

TEST(Prepared, LengthsAreThoseOfTheRun) {
  Problem1 one(64);
  std::vector<std::int32_t> ends{0, 30, 64}, lengths{30, 34};
  one.args.problem.packed = Packed{{ends.data(), DType::i32, {3}}, {ends.data(), DType::i32, {3}}, 64, 64};
  one.args.problem.mask.key_lengths = {lengths.data(), DType::i32, {2}};
  Prepared call(one.args);
  Workspace workspace;
  workspace.attach(one.args);
  const auto run = [&] { call.run(one.args.run.workspace, one.args.run.workspace_bytes); };
  ends[1] = 40;
  lengths = {3, 0};
  run();
  EXPECT_EQ(one.out.front(), 1.0f);
  EXPECT_EQ(one.out.back(), 0.0f);
  lengths[1] = 25;
  EXPECT_THROW(run(), Error);  // the second sequence has 24 keys
  lengths[1] = 24;
  run();
  ends[2] = 1 << 28;
  EXPECT_THROW(run(), Error);
}

}  // namespace
}  // namespace dspattn
