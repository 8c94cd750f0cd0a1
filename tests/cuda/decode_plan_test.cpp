// Plans for few queries: teams, splits, shared memory, and when the kernel yields to one for many.
#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/decode/plan.h"

namespace dspattn::cuda::decode {
namespace {

const DeviceFacts kH200{.present = true, .major = 9, .multiprocessors = 132, .shared_bytes = 227 * 1024};
const DeviceFacts kA100{.present = true, .major = 8, .multiprocessors = 108, .shared_bytes = 163 * 1024};

// Stands for a tensor that is never read.
void* stand_in(int index) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 40) * static_cast<std::uintptr_t>(index + 1));
}

struct Asked {
  std::int64_t batch = 1, heads = 32, kv_heads = 8, n_q = 1, n_k = 8192, d = 128;
  DType type = DType::bf16;
  std::optional<std::int64_t> window_left = std::nullopt;

  Problem problem() const {
    Problem p;
    p.q = {stand_in(0), type, {batch, heads, n_q, d}};
    p.k = {stand_in(1), type, {batch, kv_heads, n_k, d}};
    p.v = {stand_in(2), type, {batch, kv_heads, n_k, d}};
    p.mask.causal = true;
    p.mask.window_left = window_left;
    return p;
  }
  Plan plan(const DeviceFacts& device = kH200) const { return plan_of(static_cast<int>(d), problem(), device); }
};

TEST(DecodePlan, OneRowAKeyHeadGathersV) {
  EXPECT_EQ(Asked{.kv_heads = 32}.plan().teams.gather, 1);
  EXPECT_EQ(Asked{}.plan().teams.gather, 0);
  EXPECT_EQ((Asked{.kv_heads = 32, .n_q = 2}.plan().teams.gather), 0);
}

TEST(DecodePlan, TeamsHaveAWarpForEverySixteenRows) {
  const auto teams = [](std::int64_t n_q) { return Asked{.n_q = n_q}.plan().teams; };
  EXPECT_EQ(teams(1).warps, 1);
  EXPECT_EQ(teams(1).rows, 4);
  EXPECT_EQ(teams(3).rows, 16);
  EXPECT_EQ(teams(4).warps, 1);
  EXPECT_EQ(teams(5).warps, 2);
  EXPECT_EQ(teams(8).warps, 2);
  EXPECT_EQ(teams(9).warps, 4);
  EXPECT_EQ(teams(16).warps, 4);
}

TEST(DecodePlan, SharedMemoryFitsAndPartsDoNotOverlap) {
  for (const DType type : {DType::bf16, DType::f32}) {
    for (const int dim : {64, 128, 256}) {
      if (type == DType::f32 && dim == 256) continue;
      for (const int warps : {1, 2, 4}) {
        for (const int rows : {1, 2, 4, 8, 16}) {
          for (const int gather : {0, 1}) {
            const SharedLayout s = shared_layout(type, dim, {warps, rows, gather});
            EXPECT_LE(s.bytes, kSharedLimit);
            EXPECT_GE(s.ring, warps * kWarpRows * dim * element_bytes(type));
            EXPECT_GE(s.scores, s.ring + kWarps / warps * (2 * s.tile_bytes + s.v_bytes));
            EXPECT_GE(s.weights, s.scores + kWarps * rows * (tile_keys(type, dim) + 8) * 4);
            EXPECT_GE(s.codes, s.weights + kWarps * rows * tile_keys(type, dim) / 2 * element_bytes(type));
            EXPECT_GE(s.stats, s.codes + kWarps * rows * tile_keys(type, dim) / 4);
            EXPECT_GE(s.stats, kWarps * kWarpRows * dim * 4);
            for (const int offset : {s.ring, s.ring_bytes, s.tile_bytes}) EXPECT_EQ(offset % 1024, 0);
            for (const int offset : {s.scores, s.weights, s.stats, s.scores_stride, s.weights_stride})
              EXPECT_EQ(offset % 16, 0);
            EXPECT_EQ(s.codes % 4, 0);
          }
        }
      }
    }
  }
}

// A round of CTAs that leaves few multiprocessors idle.
TEST(DecodePlan, SplitsFillTheDevice) {
  EXPECT_EQ(Asked{}.plan().ctas_per_multiprocessor, 2);
  EXPECT_EQ(Asked{}.plan().ctas(), 8 * 33);
  EXPECT_EQ(Asked{.kv_heads = 32}.plan().ctas(), 32 * 8);
  const Plan many = Asked{.batch = 16, .kv_heads = 32}.plan();
  EXPECT_EQ(many.splits, 1) << "512 units fill 264 slots nearly twice";
  EXPECT_EQ(many.workspace_bytes, 0u);
}

TEST(DecodePlan, NoMoreSplitsThanTheTeamsHaveTiles) {
  const Plan tiny = Asked{.heads = 1, .kv_heads = 1, .n_k = 100}.plan();
  EXPECT_EQ(tiny.splits, 1);
  EXPECT_LE((Asked{.heads = 1, .kv_heads = 1, .n_k = 1024}.plan().splits), 8);
  EXPECT_EQ((Asked{.heads = 1, .kv_heads = 1, .n_k = 0}.plan().splits), 1);
}

TEST(DecodePlan, SmallerSharedMemoryMeansFewerRings) {
  EXPECT_EQ((Asked{.d = 256}.plan(kH200).teams.warps), 1);
  const Plan ampere = Asked{.d = 256}.plan(kA100);
  EXPECT_EQ(ampere.teams.warps, 2);
  EXPECT_LE(ampere.layout.bytes, kA100.shared_bytes);
  EXPECT_EQ((Asked{.d = 128}.plan(kA100).teams.warps), 1);
}

TEST(DecodePlan, WindowsCountForWhatTheyShow) {
  EXPECT_EQ((Asked{.n_k = 1 << 20}.plan().tiles), (1 << 20) / 32);
  EXPECT_EQ((Asked{.n_k = 1 << 20, .window_left = 1000}.plan().tiles), 9 * 4);
}

TEST(DecodePlan, WorkspaceHoldsEveryPart) {
  const Plan plan = Asked{}.plan();
  const std::size_t rows = static_cast<std::size_t>(plan.ctas()) * 4;
  EXPECT_GE(plan.stats_offset, rows * 128 * 4);
  EXPECT_GE(plan.workspace_bytes, plan.stats_offset + rows * 8);
}

TEST(DecodePlan, YieldsWhereQueriesAreMany) {
  const auto yields_to = [](const Asked& asked, const DeviceFacts& device = kH200) {
    return yields(asked.problem(), device);
  };
  EXPECT_FALSE(yields_to({}));
  EXPECT_FALSE(yields_to({.batch = 16, .n_q = 4}));
  EXPECT_TRUE(yields_to({.batch = 16, .n_q = 8})) << "twice as fast as dense already";
  EXPECT_FALSE(yields_to({.batch = 1, .n_q = 8})) << "32 items would leave multiprocessors idle";
  EXPECT_TRUE(yields_to({.batch = 16, .n_k = 256}));
  EXPECT_TRUE(yields_to({.batch = 1, .n_k = 128}));
  EXPECT_FALSE(yields_to({.batch = 16, .n_q = 8}, kA100)) << "there is no kernel for many queries";
}

TEST(DecodePlan, HeadsThatChooseTogetherShareTheirRowsOfV) {
  const auto together = [](const Asked& asked) {
    Problem problem = asked.problem();
    problem.choice = Choice::shared;
    return plan_of(static_cast<int>(asked.d), problem, kH200);
  };
  const Plan one = together({});
  EXPECT_EQ(one.teams.gather, 1);
  EXPECT_EQ(one.choice_tiles, kChoiceTiles);
  EXPECT_GE(one.workspace_bytes, one.scores_offset + std::size_t{8} * 4 * 8192 * 4);
  const Plan many = together({.n_q = 4, .d = 64});
  EXPECT_EQ(many.teams.gather, 0);
  Teams choice = many.teams;
  choice.batch = many.choice_tiles;
  EXPECT_LT(many.choice_tiles, kChoiceTiles);
  EXPECT_LE(shared_layout(DType::bf16, 64, choice).bytes, kH200.shared_bytes);
}

TEST(DecodePlan, IsPrinted) {
  const std::string text = to_string(Asked{}.plan());
  EXPECT_NE(text.find("33 CTAs"), std::string::npos) << text;
  EXPECT_NE(text.find("then a merge"), std::string::npos) << text;
}

}  // namespace
}  // namespace dspattn::cuda::decode
