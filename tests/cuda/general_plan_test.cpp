// Which shapes, products, stages and CTAs the general kernel's plan gives a problem and a card; no GPU needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cuda/general/plan.h"
#include "cuda/tile/walk.h"
#include "dspattn/pattern.h"

namespace {

using namespace dspattn;
using namespace dspattn::cuda;

// Problems by shape alone; nothing is read.
Problem problem_of(DType type, std::int64_t d, Pattern pattern = {2, 4}) {
  auto* stand_in = reinterpret_cast<void*>(std::uintptr_t{1} << 12);
  Problem problem;
  problem.device = {DeviceType::cuda, 0};
  problem.q = {stand_in, type, {2, 4, 1000, d}};
  problem.k = problem.v = {stand_in, type, {2, 4, 1000, d}};
  problem.pattern = pattern;
  return problem;
}
TensorView out_for(const Problem& problem) {
  return {const_cast<void*>(problem.q.data), problem.q.dtype, {2, 4, 1000, problem.v.extent(3)}};
}

constexpr int kAda = 99 * 1024, kAmpere = 163 * 1024, kHopper = 227 * 1024;

TEST(GeneralPlan, ChoosesStagesByWhatACardHas) {
  const auto plan = [](DType type, std::int64_t d, int shared) {
    const Problem problem = problem_of(type, d);
    DeviceFacts device;
    device.present = true;
    device.shared_bytes = shared;
    return general::plan_forward(problem, out_for(problem), device);
  };
  // Two CTAs with two stages where they fit, with one stage where not.
  EXPECT_EQ(plan(DType::bf16, 64, kAda).stages, 2);
  EXPECT_EQ(plan(DType::bf16, 64, kAda).resident, 2);
  EXPECT_EQ(plan(DType::bf16, 128, kHopper).stages, 2);
  EXPECT_EQ(plan(DType::bf16, 128, kHopper).resident, 2);
  EXPECT_EQ(plan(DType::bf16, 128, kAmpere).stages, 1);
  EXPECT_EQ(plan(DType::bf16, 128, kAmpere).resident, 2);
  // Three at d = 64.
  for (const int shared : {kAmpere, kHopper}) {
    EXPECT_EQ(plan(DType::bf16, 64, shared).stages, 2);
    EXPECT_EQ(plan(DType::bf16, 64, shared).resident, 3);
  }
  // One CTA at d = 256, with a second stage where there is room for it.
  EXPECT_EQ(plan(DType::bf16, 256, kAmpere).stages, 2);
  EXPECT_EQ(plan(DType::bf16, 256, kAmpere).resident, 1);
  EXPECT_EQ(plan(DType::bf16, 256, kAda).stages, 1);
  // Every shape has a place on the smallest card.
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t d : {1, 64, 65, 128, 200, 256, 257, 512}) {
      EXPECT_LE(plan(type, d, kAda).shared_bytes + plan(type, d, kAda).shape.own_bytes, kAda);
    }
  }
}

// 16 rows a warp and a fourth CTA win up to 512 keys of which rows see half (docs/log/general.md, "Rows of few keys"),
// and nowhere else.
TEST(GeneralPlan, FewKeysHaveAShapeOfTheirOwn) {
  using general::Scope;
  const auto problem_with = [](std::int64_t n_q, std::int64_t n_k, bool causal, Pattern pattern = {2, 4}, int d = 64) {
    Problem problem = problem_of(DType::bf16, d, pattern);
    problem.q = {problem.q.data, DType::bf16, {2, 4, n_q, d}};
    problem.k = problem.v = {problem.q.data, DType::bf16, {2, 4, n_k, d}};
    problem.mask.causal = causal;
    return problem;
  };
  const auto plan = [](const Problem& problem, int shared = kHopper) {
    DeviceFacts device;
    device.present = true;
    device.shared_bytes = shared;
    return general::plan_forward(problem, out_for(problem), device);
  };
  for (const Pattern& pattern : {Pattern{2, 4}, Pattern{1, 2}, Pattern::dense()}) {
    const general::ForwardPlan brief = plan(problem_with(256, 256, true, pattern));
    EXPECT_EQ(brief.scope, Scope::brief);
    EXPECT_EQ(brief.tile_q(), 64);
    EXPECT_EQ(brief.resident, 4);
    EXPECT_EQ(brief.ctas, 2 * 4 * 4);
  }
  for (const std::int64_t n : {1, 2, 127, 511, 512}) EXPECT_EQ(plan(problem_with(n, n, true)).scope, Scope::brief) << n;
  EXPECT_EQ(plan(problem_with(513, 513, true)).scope, Scope::plain);
  EXPECT_EQ(plan(problem_with(256, 256, false)).scope, Scope::plain);
  EXPECT_EQ(plan(problem_with(256, 256, true, {1, 4})).scope, Scope::plain);
  EXPECT_EQ(plan(problem_with(256, 256, true, {2, 4}, 128)).scope, Scope::plain);
  // The last rows see most keys.
  EXPECT_EQ(plan(problem_with(64, 256, true)).scope, Scope::plain);
  Problem window = problem_with(256, 256, false);
  window.mask.window_left = window.mask.window_right = 32;
  EXPECT_EQ(plan(window).scope, Scope::brief);
  window.mask.window_left = window.mask.window_right = 200;
  EXPECT_EQ(plan(window).scope, Scope::plain);
  // Where four CTAs do not fit.
  EXPECT_EQ(plan(problem_with(256, 256, true), kAmpere).scope, Scope::plain);
  EXPECT_EQ(plan(problem_with(256, 256, true), kAda).scope, Scope::plain);
}

// The same on Hopper with fp32 at d = 256: twice the warps, where a head has the rows for them.
TEST(GeneralPlan, GivesFp32AtD256AllTheSharedMemoryThereIs) {
  DeviceFacts device;
  device.present = true;
  device.multiprocessors = 132;
  for (const auto& [shared, warps, stages] :
       {std::tuple{kAda, 4, 0}, std::tuple{kAmpere, 4, 1}, std::tuple{kHopper, 8, 1}}) {
    device.shared_bytes = shared;
    const Problem problem = problem_of(DType::f32, 256);
    const general::ForwardPlan plan = general::plan_forward(problem, out_for(problem), device);
    EXPECT_EQ(plan.warps, warps);
    EXPECT_EQ(plan.stages, stages);
    EXPECT_EQ(plan.resident, 1);
    EXPECT_LE(plan.shared_bytes + plan.shape.own_bytes, shared);
    EXPECT_EQ(plan.row_tiles, tile::divide_up(1000, plan.tile_q()));
  }
}

// A CTA asks for the shared memory of its own shape, which the card has, and has no more threads than the instance was
// compiled for.
TEST(GeneralPlan, AsksForWhatItsShapeTakes) {
  DeviceFacts device;
  device.present = true;
  device.multiprocessors = 132;
  Problem precise = problem_of(DType::f32, 64);
  precise.fp32_products = Fp32Products::full;
  for (const int shared : {kAda, kAmpere, kHopper}) {
    device.shared_bytes = shared;
    for (const Problem& of : {problem_of(DType::bf16, 64), problem_of(DType::f32, 64), precise}) {
      for (const Pattern& pattern : {Pattern{2, 4}, Pattern{1, 2}, Pattern{1, 4}, Pattern::dense()}) {
        for (const std::int64_t d : {64, 128, 235, 256, 300, 512}) {
          for (const std::int64_t n : {1, 16, 19, 64, 65, 129, 1000, 5000}) {
            for (const bool causal : {false, true}) {
              for (const bool capped : {false, true}) {
                Problem problem = of;
                problem.pattern = pattern;
                problem.q = problem.k = problem.v = {of.q.data, of.q.dtype, {2, 4, n, d}};
                problem.mask.causal = causal;
                if (capped) problem.soft_cap = 30;
                const general::ForwardPlan plan = general::plan_forward(problem, out_for(problem), device);
                EXPECT_LE(plan.warps, plan.shape.most_warps);
                EXPECT_EQ(plan.shape.shared_bytes(plan.warps, plan.stages), plan.shared_bytes);
                EXPECT_LE(plan.shared_bytes + plan.shape.own_bytes, shared);
              }
            }
          }
        }
      }
    }
  }
}

TEST(GeneralPlan, EveryRowTileIsTakenOnce) {
  DeviceFacts device;
  device.present = true;
  device.shared_bytes = kHopper;
  for (const int multiprocessors : {1, 3, 132}) {
    device.multiprocessors = multiprocessors;
    for (const std::int64_t n : {64, 256, 300, 1000, 1024, 1100, 2048}) {
      for (const bool causal : {false, true}) {
        Problem problem = problem_of(DType::bf16, 128);
        problem.q = problem.k = problem.v = {problem.q.data, DType::bf16, {5, 7, n, 128}};
        problem.mask.causal = causal;
        const TensorView out{const_cast<void*>(problem.q.data), DType::bf16, {5, 7, n, 128}};
        const general::ForwardPlan plan = general::plan_forward(problem, out, device);
        SCOPED_TRACE(testing::Message() << n << " " << multiprocessors << " " << general::to_string(plan));
        // Long rows are taken as CTAs become free.
        EXPECT_EQ(plan.order.rounds > 1, (causal || n <= 1024) && 35 * plan.row_tiles > 2 * multiprocessors);
        std::vector<int> taken(static_cast<std::size_t>(35 * plan.row_tiles));
        for (int worker = 0; worker < plan.ctas; ++worker) {
          for (int round = 0; round < plan.order.rounds; ++round) {
            const tile::ItemIndex item = tile::item_of_round<false>(plan.order, round, worker);
            if (item.row_tile >= 0)
              ++taken[static_cast<std::size_t>(item.sequence_head * plan.row_tiles + item.row_tile)];
          }
        }
        EXPECT_EQ(taken, std::vector<int>(taken.size(), 1));
      }
    }
  }
}

TEST(GeneralPlan, ChoosesProductsByTypeAndPattern) {
  using general::Kind, general::Scope;
  const auto kind_of = [](const Problem& problem) { return general::kind_of(problem, general::scope_of(problem)); };
  EXPECT_EQ(kind_of(problem_of(DType::bf16, 64, {2, 4})), Kind::fours);
  EXPECT_EQ(kind_of(problem_of(DType::f16, 64, {1, 2})), Kind::fours);
  EXPECT_EQ(kind_of(problem_of(DType::f16, 64, {1, 4})), Kind::any);
  EXPECT_EQ(kind_of(problem_of(DType::bf16, 64, Pattern::dense())), Kind::any);
  EXPECT_EQ(kind_of(problem_of(DType::f32, 64, {1, 2})), Kind::pairs);
  EXPECT_EQ(kind_of(problem_of(DType::f32, 64, {2, 4})), Kind::any);
  Problem precise = problem_of(DType::f32, 64, {1, 2});
  precise.fp32_products = Fp32Products::full;
  EXPECT_EQ(kind_of(precise), Kind::precise);
  EXPECT_EQ(general::dim_of(problem_of(DType::bf16, 65)), 128);
  EXPECT_EQ(general::dim_of(problem_of(DType::bf16, 129)), 256);
  EXPECT_EQ(general::dim_of(problem_of(DType::bf16, 257)), 512);
}

TEST(GeneralPlan, GivesWhatFewProblemsAskForToTheInstancesThatHaveIt) {
  using general::Kind, general::Scope;
  const auto expect_all = [](const Problem& problem) {
    EXPECT_EQ(general::scope_of(problem), Scope::all);
    EXPECT_EQ(general::kind_of(problem, Scope::all), Kind::any);
  };
  const Problem plain = problem_of(DType::bf16, 64);
  EXPECT_EQ(general::scope_of(plain), Scope::plain);
  Problem capped = plain, dropped = plain, mean = plain, shared = plain, dense = plain;
  capped.soft_cap = 30;
  dropped.dropout.probability = 0.1;
  mean.rest = Rest::mean;
  shared.choice = Choice::shared;
  for (const Problem& problem : {capped, dropped, mean, shared, problem_of(DType::bf16, 257)}) expect_all(problem);
  // Where nothing is pruned neither the rest nor the choice matters.
  dense.pattern = Pattern::dense();
  dense.rest = Rest::mean;
  dense.choice = Choice::shared;
  EXPECT_EQ(general::scope_of(dense), Scope::plain);
}

TEST(GeneralPlan, HeadsThatChooseTogetherShareATile) {
  Problem problem = problem_of(DType::bf16, 64);
  problem.choice = Choice::shared;
  problem.q.shape[1] = 12;  // three a key head
  DeviceFacts device;
  device.present = true;
  device.shared_bytes = kHopper;
  const general::ForwardPlan plan = general::plan_forward(problem, out_for(problem), device);
  EXPECT_TRUE(plan.together);
  EXPECT_EQ(plan.group.heads, 3);
  EXPECT_EQ(plan.group.rows_log2, 2);
  EXPECT_EQ(plan.row_tiles, (1000 + plan.tile_q() / 4 - 1) / (plan.tile_q() / 4));
  EXPECT_EQ(plan.ctas, 2 * 4 * plan.row_tiles);
  EXPECT_GE(plan.workspace_bytes, 2u * 12 * 1000 * 4);
  problem.q.shape[1] = 4 * 20;  // two tiles a key head
  const general::ForwardPlan many = general::plan_forward(problem, out_for(problem), device);
  EXPECT_EQ(many.row_tiles, (1000 + many.tile_q() / 16 - 1) / (many.tile_q() / 16));
  EXPECT_EQ(many.ctas, 2 * 4 * 2 * many.row_tiles);
}

// Wide outputs are shared out over CTAs.
TEST(GeneralPlan, WideOutputsTakeSeveralCtas) {
  DeviceFacts device;
  device.present = true;
  device.shared_bytes = kAda;
  Problem problem = problem_of(DType::bf16, 512);
  EXPECT_EQ(general::plan_forward(problem, out_for(problem), device).column_parts, 2);
  EXPECT_EQ(general::plan_forward(problem, out_for(problem), device).stages, 0);
  problem.v.shape[3] = 200;
  EXPECT_EQ(general::plan_forward(problem, out_for(problem), device).column_parts, 1);
  problem = problem_of(DType::f32, 512);
  EXPECT_EQ(general::plan_forward(problem, out_for(problem), device).column_parts, 4);
}

}  // namespace
