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
            const Teams teams{.warps = warps, .rows = rows, .gather = gather, .count = 4 / warps};
            const SharedLayout s = shared_layout(type, dim, teams);
            EXPECT_GE(s.ring, warps * kWarpRows * dim * element_bytes(type));
            EXPECT_GE(s.scores, s.ring + teams.count * (2 * s.tile_bytes + (gather != 0 ? 2 : 1) * s.v_bytes));
            if (!weighs_in_registers(type, dim)) {
              EXPECT_GE(s.weights, s.scores + 4 * rows * (tile_keys(type, dim) + 8) * 4);
              EXPECT_GE(s.codes, s.weights + 4 * s.buffers * rows * tile_keys(type, dim) / 2 * element_bytes(type));
              EXPECT_GE(s.stats, s.codes + 4 * s.buffers * rows * tile_keys(type, dim) / 4);
            }
            EXPECT_GE(s.stats, 4 * kWarpRows * dim * 4);
            EXPECT_GE(s.whole, s.stats + 4 * kWarpRows * kStatsBytes);
            EXPECT_GE(s.bytes, s.touched + 4 * kMaxWarps);
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

// Every CTA of a cluster has a place for what each sends: rows' stats, and results of the columns that it joins.
TEST(DecodePlan, WhatACLusterSendsHasItsPlace) {
  for (const int cluster : {1, 2, 3, 7, 8, 16}) {
    for (const int rows : {1, 4, 16}) {
      const Teams teams{.rows = rows, .gather = 1, .count = 4, .cluster = cluster, .chosen = 1, .lanes = 1, .stay = 3};
      const SharedLayout s = shared_layout(DType::bf16, 128, teams);
      EXPECT_GE(s.sent, s.told + cluster * 4 * rows * kToldBytes);
      EXPECT_GE(s.chunks * cluster, rows * 128 / 4) << "all columns are joined by somebody";
      const int sent = cluster > 1 ? cluster * (rows * kStatsBytes + s.chunks * 16) : 0;
      EXPECT_GE(s.arrived, s.sent + sent);
      for (const int offset : {s.sent, s.arrived, s.kept}) EXPECT_EQ(offset % 16, 0);
      for (const int offset : {s.told, s.touched}) EXPECT_EQ(offset % 8, 0);
    }
  }
}

// A round of CTAs that leaves few multiprocessors idle, in clusters where there are some.
TEST(DecodePlan, SplitsFillTheDevice) {
  const Plan grouped = Asked{.n_k = 1 << 17}.plan();
  EXPECT_EQ(grouped.splits, 16);
  EXPECT_EQ(grouped.cluster, 1) << "there is room for seven clusters of 16, not for eight";
  EXPECT_EQ(grouped.teams.count, 8);
  EXPECT_EQ(grouped.ctas_per_multiprocessor, 1);
  EXPECT_EQ(Asked{}.plan().cluster, 8) << "12.7 us, with a second kernel 15.1";
  EXPECT_EQ((Asked{.n_k = 2048}.plan().cluster), 8) << "6.4 us, in clusters of 4 7.7";
  EXPECT_EQ((Asked{.n_k = 2048, .d = 64}.plan().cluster), 4) << "5.3 us, with a second kernel 7.4";
  const Plan small = Asked{.n_k = 1024, .d = 64}.plan();
  EXPECT_EQ(small.cluster, small.splits) << "for few keys a second kernel takes longer";
  EXPECT_EQ(small.workspace_bytes, 0u) << "a cluster joins its results by itself";
  EXPECT_EQ((Asked{.kv_heads = 32}.plan().ctas()), 32 * 4) << "as far as anybody knows without asking the driver";
  ClusterRoom room;
  room.clusters[3] = 43;
  const Problem small_rows = Asked{.kv_heads = 32, .d = 64}.problem();
  EXPECT_EQ(plan_of(64, small_rows, kH200, room).cluster, 3) << "17.9 us, 20.4 with a second kernel of 4 parts";
  EXPECT_EQ((Asked{.batch = 16}.plan().splits), 1) << "128 units fill 132 multiprocessors";
  const Plan many = Asked{.batch = 16, .kv_heads = 32}.plan();
  EXPECT_EQ(many.splits, 1) << "512 units fill 264 slots nearly twice";
  EXPECT_EQ(many.ctas_per_multiprocessor, 2) << "one computes while another begins";
  EXPECT_EQ(many.workspace_bytes, 0u);
  const Plan several = Asked{.batch = 16, .kv_heads = 32, .n_q = 2}.plan();
  EXPECT_EQ(several.ctas_per_multiprocessor, 2) << "470 us beside 475";
  EXPECT_EQ((Asked{.batch = 16, .n_q = 2}.plan().ctas_per_multiprocessor), 1) << "one round of CTAs";
  EXPECT_EQ((Asked{.batch = 4, .heads = 16, .kv_heads = 4, .n_k = 576}.plan().cluster), 4) << "9.2 us, merged 10.3";
  const Plan alone = Asked{.heads = 1, .kv_heads = 1, .n_k = 1 << 17}.plan();
  EXPECT_GT(alone.splits, 100) << "more than a cluster has";
  EXPECT_EQ(alone.cluster, 1);
  EXPECT_TRUE(alone.joins_last());
}

TEST(DecodePlan, WithoutClustersOneCtaJoins) {
  const Plan plan = Asked{}.plan(kA100);
  EXPECT_GT(plan.splits, 1);
  EXPECT_EQ(plan.cluster, 1);
  EXPECT_TRUE(plan.joins_last());
  EXPECT_FALSE(plan.merges());
  // Of many rows a second kernel does, on more multiprocessors: 64 rows 29 us beside 36; 16 of d = 64 12.6 either way.
  const Plan many = Asked{.n_q = 16}.plan(kA100);
  EXPECT_FALSE(many.joins_last());
  EXPECT_TRUE((Asked{.n_q = 4, .d = 64}.plan(kA100).joins_last()));
  EXPECT_TRUE((Asked{.n_q = 4}.plan(kA100).merges()));
  EXPECT_TRUE(many.merges());
}

TEST(DecodePlan, ClustersLieWithinGroupsOfMultiprocessors) {
  EXPECT_EQ(slots_of(kH200, 1, 1), 132);
  EXPECT_EQ(slots_of(kH200, 2, 1), 132);
  EXPECT_EQ(slots_of(kH200, 8, 1), 120) << "as cudaOccupancyMaxActiveClusters says of an H200";
  EXPECT_EQ(slots_of(kH200, 4, 2), 240);
  EXPECT_EQ(slots_of(kH200, 16, 1), 112);
  EXPECT_EQ(slots_of(kH200, 16, 2), 224);
  ClusterRoom room;
  room.clusters[14] = 8;
  EXPECT_EQ(slots_of(kH200, 14, 1, room), 112) << "as the driver says";
}

TEST(DecodePlan, NoMoreSplitsAndTeamsThanTiles) {
  const Plan tiny = Asked{.heads = 1, .kv_heads = 1, .n_k = 100}.plan();
  EXPECT_LE(tiny.splits * tiny.teams.count, 4);
  const Plan small = Asked{.heads = 1, .kv_heads = 1, .n_k = 1024}.plan();
  EXPECT_LE(small.splits * small.teams.count, 32);
  EXPECT_EQ((Asked{.heads = 1, .kv_heads = 1, .n_k = 0}.plan().splits), 1);
}

TEST(DecodePlan, SmallerSharedMemoryMeansFewerTeams) {
  EXPECT_EQ((Asked{.batch = 16, .d = 256}.plan(kH200).teams.count), 4);
  const Plan ampere = Asked{.batch = 16, .d = 256}.plan(kA100);
  EXPECT_LE(ampere.teams.count * ampere.ctas_per_multiprocessor, 3);
  EXPECT_LE(ampere.layout.bytes, kA100.shared_bytes);
}

TEST(DecodePlan, WindowsCountForWhatTheyShow) {
  EXPECT_EQ((Asked{.n_k = 1 << 20}.plan().tiles), (1 << 20) / 32);
  EXPECT_EQ((Asked{.n_k = 1 << 20, .window_left = 1000}.plan().tiles), 9 * 4);
}

TEST(DecodePlan, WorkspaceHoldsEveryPart) {
  const Plan plan = Asked{}.plan(kA100);
  const std::size_t rows = static_cast<std::size_t>(plan.ctas()) * 4;
  EXPECT_EQ(partial_columns(128), 128);
  EXPECT_EQ(partial_columns(97), 100);
  EXPECT_GE(plan.stats_offset, rows * 128 * 4);
  EXPECT_GE(plan.arrived_offset, plan.stats_offset + rows * kStatsBytes);
  EXPECT_GE(plan.workspace_bytes, plan.arrived_offset + 8 * sizeof(std::uint64_t));
  const Plan merged = Asked{.n_q = 16}.plan(kA100);
  const std::size_t many = static_cast<std::size_t>(merged.ctas()) * 64;
  EXPECT_GE(merged.stats_offset, many * 128 * 4);
  EXPECT_GE(merged.workspace_bytes, merged.stats_offset + many * 8);
}

TEST(DecodePlan, YieldsWhereQueriesAreMany) {
  const auto yields_to = [](const Asked& asked, const DeviceFacts& device = kH200) {
    return yields(asked.problem(), device);
  };
  EXPECT_FALSE(yields_to({}));
  EXPECT_FALSE(yields_to({.batch = 16, .n_q = 4}));
  EXPECT_FALSE(yields_to({.batch = 16, .n_q = 8})) << "32 rows: 140 us beside 219";
  EXPECT_TRUE(yields_to({.batch = 16, .n_q = 16})) << "64 rows: 246 us beside 223";
  EXPECT_FALSE(yields_to({.batch = 16, .n_q = 16, .d = 64})) << "147 us beside 165";
  EXPECT_FALSE(yields_to({.batch = 1, .n_q = 16})) << "32 items would leave multiprocessors idle";
  EXPECT_TRUE(yields_to({.batch = 1, .n_q = 16, .n_k = 1024})) << "64 rows: 11.8 us beside 9.6";
  EXPECT_FALSE(yields_to({.batch = 1, .n_q = 16, .n_k = 2048})) << "12.8 us beside 14.6";
  EXPECT_TRUE(yields_to({.batch = 1, .n_q = 8, .n_k = 512})) << "32 rows: 9.6 us beside 8.2";
  EXPECT_FALSE(yields_to({.batch = 1, .n_q = 8, .n_k = 1024})) << "10.5 us beside 11.6";
  EXPECT_TRUE(yields_to({.batch = 1, .n_q = 17}));
  EXPECT_TRUE(yields_to({.batch = 16, .n_k = 256}));
  EXPECT_TRUE(yields_to({.batch = 1, .n_k = 128}));
  EXPECT_FALSE(yields_to({.batch = 16, .n_q = 16}, kA100)) << "the kernel for many queries is a general one";
  EXPECT_TRUE(yields_to({.batch = 16, .n_q = 17}, kA100));
}

TEST(DecodePlan, HeadsThatChooseTogetherShareTheirRowsOfV) {
  const auto together = [](const Asked& asked, const ClusterRoom& room = {}) {
    Problem problem = asked.problem();
    problem.choice = Choice::shared;
    return plan_of(static_cast<int>(asked.d), problem, kH200, room);
  };
  const Plan one = together({});
  EXPECT_EQ(one.teams.gather, 1);
  EXPECT_EQ((together({.n_q = 4}).teams.gather), 0);
  // Every tile of a team has room for its scores, and they stay: 18.3 us beside 22.0 with 8192 keys.
  for (const Asked& asked : {Asked{.n_k = 2048}, Asked{}, Asked{.batch = 16}, Asked{.batch = 16, .d = 64}}) {
    const Plan plan = together(asked);
    EXPECT_EQ(plan.cluster, plan.splits);
    EXPECT_GE(plan.teams.stay * plan.teams.count * plan.splits, plan.tiles);
    EXPECT_LE(plan.layout.bytes, kH200.shared_bytes);
    EXPECT_EQ(plan.workspace_bytes, 0u);
  }
  const Plan packed = together({.batch = 4, .heads = 16, .kv_heads = 4, .n_k = 8256});
  EXPECT_LE(packed.teams.cta_warps() * packed.ctas_per_multiprocessor, kMaxWarps) << "registers of a multiprocessor";
  // Clusters of 16 would have eight units in two rounds: 303 us, where two kernels take 118 and a cooperative launch
  // 103.
  for (const Asked& asked : {Asked{.n_k = 1 << 15}, Asked{.n_k = 1 << 17}, Asked{.n_k = 1 << 17, .d = 64}}) {
    const Plan plan = together(asked);
    EXPECT_EQ(plan.teams.spread, 1);
    EXPECT_EQ(plan.cluster, 1);
    EXPECT_LE(plan.ctas(), kH200.multiprocessors) << "all at once";
    EXPECT_TRUE(plan.joins_last());
    EXPECT_GE(plan.teams.stay * plan.teams.count * plan.splits, plan.tiles);
    EXPECT_LE(plan.layout.bytes, kH200.shared_bytes);
    EXPECT_GE(plan.whole_offset, plan.stats_offset + static_cast<std::size_t>(plan.ctas()) * 4 * kStatsBytes);
    EXPECT_GE(plan.arrived_offset, plan.whole_offset + static_cast<std::size_t>(plan.ctas()) * 4 * kTaggedBytes);
    EXPECT_GE(plan.workspace_bytes, plan.arrived_offset + 8 * sizeof(std::uint64_t));
  }
  // Scores of more rows than these, or of several queries, are in the workspace.
  EXPECT_NE(together({.heads = 64}).teams.stay, 0);
  EXPECT_EQ(together({.heads = 72}).teams.stay, 0);
  EXPECT_EQ(together({.n_q = 2}).teams.stay, 0);
  // A cluster has no room for these.
  const Plan large = together({.n_k = 1 << 20});
  EXPECT_EQ(large.teams.stay, 0);
  EXPECT_EQ(large.teams.chosen, 1);
  EXPECT_GE(large.workspace_bytes, large.scores_offset + (std::size_t{8} * 4 * 2 << 20));
}

TEST(DecodePlan, IsPrinted) {
  const std::string text = to_string(Asked{.n_k = 1 << 17}.plan());
  EXPECT_NE(text.find("16 CTAs"), std::string::npos) << text;
  EXPECT_NE(text.find("the last of a unit joins"), std::string::npos) << text;
  EXPECT_NE(to_string(Asked{.n_q = 16}.plan(kA100)).find("then a merge"), std::string::npos);
  EXPECT_NE(to_string(Asked{.n_k = 1024, .d = 64}.plan()).find("clusters of"), std::string::npos);
}

}  // namespace
}  // namespace dspattn::cuda::decode
