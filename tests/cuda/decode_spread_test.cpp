// Few queries whose CTAs are no clusters, tell each other by the workspace and join by themselves: problems that are
// long enough for them on a large card take long to check, so plans are made for a card without clusters and with
// little shared memory. On the emulator CTAs run one after the other, so that the first of a unit does what the others
// have not begun, or side by side (DSPATTN_EMULATOR_SIDE_BY_SIDE). Skipped without a GPU of sm_90.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "check/check.h"
#include "check/runner.h"
#include "cuda/decode/decode.h"
#include "cuda/decode/plan.h"
#include "cuda/decode_problems.h"
#include "cuda/device/device.h"
#include "dspattn/error.h"

namespace dspattn::cuda::decode {
namespace {

class DecodeSpread : public ::testing::TestWithParam<DecodeRow> {
 protected:
  void SetUp() override {
    if (const DeviceFacts& device = device_facts(0); !device.present || device.major < 9) GTEST_SKIP() << "no sm_90";
  }
  check::Case problem(std::int64_t heads, std::int64_t n_k, Pattern pattern) const {
    check::Case drawn = few_queries(GetParam().type, GetParam().dim, heads, 1, 1, n_k);
    drawn.pattern = pattern;
    drawn.choice = Choice::shared;
    return drawn;
  }
  enum class Kind { spread, two_kernels, own };
  // By the plan for a card that is like this one but for these facts.
  void expect_right(const check::Case& drawn, Kind kind = Kind::spread, int multiprocessors = 0) const {
    check::Runner runner = check::library_runner(gpu_memory(), row_name(GetParam()), {});
    runner.forward = [&](const ForwardArgs& given) {
      ForwardArgs args = given;
      if (args.problem.v.extent(3) > GetParam().dim) throw Error("d_v: takes up to the row's");  // selection is probed
      ClusterRoom none;
      for (std::size_t ctas = 2; ctas < none.clusters.size(); ++ctas) none.clusters[ctas] = -1;
      DeviceFacts small = device_facts(0);
      small.shared_bytes = 32 * 1024;  // a team has room: more CTAs are worth while
      if (kind == Kind::two_kernels) small.major = 8;
      if (multiprocessors > 0) small.multiprocessors = multiprocessors;
      const Plan plan = plan_of(GetParam().dim, args.problem, small, none);
      EXPECT_EQ(plan.teams.spread, kind == Kind::spread ? 1 : 0) << to_string(plan);
      EXPECT_EQ(plan.teams.stay > 0, kind == Kind::spread) << to_string(plan);
      EXPECT_EQ(plan.teams.chosen > 0, kind != Kind::own) << to_string(plan);
      EXPECT_TRUE(plan.joins_last()) << to_string(plan);
      if (multiprocessors > 0) {
        EXPECT_GT(plan.splits, 16) << to_string(plan);
      }
      core::DeviceBuffer workspace(gpu_memory(), plan.workspace_bytes);
      std::vector<std::uint8_t> garbage(workspace.bytes(), 0xA5);
      workspace.upload(garbage.data());
      args.run.workspace = workspace.data();
      args.run.workspace_bytes = workspace.bytes();
      forward_launch(GetParam(), args, plan);
      workspace.download(garbage.data());  // waits
      replay(args, plan);                  // over what another launch has left, and over what it leaves itself
    };
    check::CheckOptions options;
    options.device = kGpu;
    const check::CaseReport report = check::check_drawn(drawn, runner, options);
    for (const std::string& failure : report.failures) ADD_FAILURE() << report.description << "\n" << failure;
  }

 private:
  // A launch of a graph has the same tag every time.
  static void replay(ForwardArgs args, const Plan& plan) {
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    args.run.stream = stream;
    forward_launch(GetParam(), args, plan);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (int i = 0; i < 3; ++i) ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
};

TEST_P(DecodeSpread, AgreesWithTheOracle) {
  expect_right(problem(3, 500, {2, 4}));
  expect_right(problem(4, 700, {1, 2}));
  expect_right(problem(8, 700, {2, 4}));
}

// Parts that have no key, and NaN past the lengths.
TEST_P(DecodeSpread, Lengths) {
  for (const std::int32_t length : {0, 5, 300, 700}) {
    check::Case drawn = problem(4, 700, {2, 4});
    drawn.key_lengths = {length};
    drawn.nan_past_length = true;
    expect_right(drawn);
  }
}

TEST_P(DecodeSpread, SumsOfValues) {
  check::Case drawn = problem(4, 700, {2, 4});
  drawn.rest = Rest::mean;
  drawn.value_sums = true;
  expect_right(drawn);
}

// Before Hopper, or where no multiprocessor has room for the scores: two kernels, and a third that joins.
TEST_P(DecodeSpread, InTwoKernels) {
  expect_right(problem(4, 1100, {2, 4}), Kind::two_kernels);
  expect_right(problem(7, 1100, {1, 2}), Kind::two_kernels);
}

// More parts than are joined at once, of rows whose length is no multiple of anything.
TEST_P(DecodeSpread, ManyParts) {
  check::Case drawn = problem(5, 40 * tile_keys(GetParam().type, GetParam().dim), {2, 4});
  drawn.choice = Choice::each_head;
  drawn.d_v = GetParam().dim - 3;
  drawn.rest = Rest::mean;
  drawn.value_sums = true;
  expect_right(drawn, Kind::own, 20);
}

std::string name_of_row(const ::testing::TestParamInfo<DecodeRow>& info) { return row_name(info.param); }

INSTANTIATE_TEST_SUITE_P(Rows, DecodeSpread,
                         ::testing::Values(DecodeRow{DType::bf16, 64, 0}, DecodeRow{DType::bf16, 128, 64},
                                           DecodeRow{DType::f16, 64, 0}),
                         name_of_row);

}  // namespace
}  // namespace dspattn::cuda::decode
