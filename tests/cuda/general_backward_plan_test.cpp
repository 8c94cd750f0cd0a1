// The general backward where there is no GPU: plans, the workspace, which rows a key tile's CTA walks, and which CTA
// adds up what of a bias's gradient.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <tuple>

#include "cuda/general/backward/bias_walk.h"
#include "cuda/general/backward/plan.h"
#include "cuda/tile/key_tiles.h"

namespace dspattn::cuda::general::backward {
namespace {

const DeviceFacts kH200{.present = true, .major = 9, .multiprocessors = 132, .shared_bytes = 227 * 1024};
const DeviceFacts kGeForce{.present = true, .major = 8, .minor = 9, .multiprocessors = 128, .shared_bytes = 99 * 1024};

// Stands for a tensor that is never read.
void* stand_in(int index) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 40) * (1u + static_cast<unsigned>(index)));
}

Problem problem_of(DType type, std::int64_t n_q, std::int64_t n_k, std::int64_t d) {
  Problem p;
  p.q = {stand_in(0), type, {2, 8, n_q, d}};
  p.k = {stand_in(1), type, {2, 4, n_k, d}};
  p.v = {stand_in(2), type, {2, 4, n_k, d}};
  return p;
}

TEST(GeneralBackwardPlan, EveryShapeFitsEveryCard) {
  for (const DType type : {DType::bf16, DType::f32}) {
    for (const std::int64_t d : {64, 128, 256, 512}) {
      for (const DeviceFacts& device : {kH200, kGeForce}) {
        if (type == DType::f32 && d == 512 && device.shared_bytes < 200 * 1024) continue;  // refused
        const BackwardPlan plan = plan_backward(problem_of(type, 1000, 1000, d), {}, device);
        for (const KernelPlan& kernel : {plan.queries, plan.keys}) {
          EXPECT_LE(kernel.resident * (kernel.shared_bytes + 1024), device.shared_bytes + 1024) << to_string(plan);
          EXPECT_EQ(kRowUnit % kernel.rows, 0);
        }
        EXPECT_EQ(plan.keys.ctas, 2 * 4 * ((1000 + 127) / 128) * (128 / plan.keys.keys));
        EXPECT_EQ(plan.queries.ctas, 2 * 8 * ((1000 + plan.queries.rows - 1) / plan.queries.rows) * plan.column_parts);
      }
    }
  }
}

TEST(GeneralBackwardPlan, TwoStagesWhereAllCtasHaveThem) {
  EXPECT_EQ(plan_backward(problem_of(DType::bf16, 512, 512, 128), {}, kH200).queries.stages, 2);
  EXPECT_EQ(plan_backward(problem_of(DType::bf16, 512, 512, 128), {}, kH200).keys.stages, 2);
  EXPECT_EQ(plan_backward(problem_of(DType::bf16, 512, 512, 64), {}, kH200).keys.stages, 2);
  EXPECT_EQ(plan_backward(problem_of(DType::bf16, 512, 512, 128), {}, kGeForce).keys.stages, 1);
  EXPECT_EQ(plan_backward(problem_of(DType::bf16, 512, 512, 64), {}, kH200).queries.resident, 4);
  EXPECT_EQ(plan_backward(problem_of(DType::bf16, 512, 512, 64), {}, kGeForce).queries.resident, 3);
  // Weights take the places of K and V: nothing can come ahead.
  EXPECT_EQ(plan_backward(problem_of(DType::f32, 512, 512, 256), {}, kH200).keys.stages, 1);
}

TEST(GeneralBackwardPlan, ACtaHasAsManyKeysAsItCan) {
  EXPECT_EQ(plan_backward(problem_of(DType::bf16, 512, 512, 128), {}, kH200).keys.keys, 128);
  EXPECT_EQ(plan_backward(problem_of(DType::bf16, 512, 512, 64), {}, kH200).keys.keys, 128);
  EXPECT_EQ(plan_backward(problem_of(DType::bf16, 512, 512, 128), {}, kGeForce).keys.keys, 64);
  const BackwardPlan rows = plan_backward(problem_of(DType::bf16, 512, 512, 64), {}, kGeForce);
  EXPECT_EQ(rows.keys.keys, 64);  // two stages, without which keys cannot be rows
  EXPECT_EQ(rows.keys.stages, 2);
  EXPECT_LE(rows.keys.shared_bytes + kDescriptionBytes, kGeForce.shared_bytes);
  EXPECT_EQ(plan_backward(problem_of(DType::bf16, 512, 512, 256), {}, kH200).keys.keys, 32);
  EXPECT_EQ(plan_backward(problem_of(DType::f32, 512, 512, 64), {}, kH200).keys.keys, 64);
}

TEST(GeneralBackwardPlan, FeaturesHaveAnInstanceOfTheirOwn) {
  Problem problem = problem_of(DType::bf16, 512, 512, 64);
  const auto is_plain = [&] { return plan_backward(problem, {}, kH200).is_plain; };
  EXPECT_TRUE(is_plain());
  EXPECT_TRUE(plan_backward(problem, {}, kH200).has_key_rows);
  EXPECT_FALSE(plan_backward(problem_of(DType::bf16, 512, 512, 128), {}, kH200).has_key_rows);
  problem.soft_cap = 30;
  EXPECT_FALSE(is_plain());
  EXPECT_FALSE(plan_backward(problem, {}, kH200).has_key_rows);
  problem.soft_cap.reset();
  problem.dropout.probability = 0.1;
  EXPECT_FALSE(is_plain());
  problem.dropout.probability = 0;
  problem.mask.allowed = {stand_in(3), DType::b8, {1, 1, 512, 512}};
  EXPECT_FALSE(is_plain());
  problem.mask.allowed = {};
  problem.pattern = {1, 4};
  EXPECT_TRUE(is_plain());
  problem.pattern = {5, 32};
  EXPECT_TRUE(is_plain());
  problem.pattern = {3, 5};
  problem.grouping = Grouping::consecutive;
  EXPECT_FALSE(is_plain());  // tiles of 20 keys
  problem.grouping = Grouping::interleaved;
  problem.pattern = Pattern::dense();
  EXPECT_TRUE(is_plain());
  EXPECT_FALSE(plan_backward(problem_of(DType::bf16, 512, 512, 256), {}, kH200).is_plain);
  EXPECT_FALSE(plan_backward(problem_of(DType::f32, 512, 512, 64), {}, kH200).is_plain);
}

TEST(GeneralBackwardPlan, FullProductsAreForFp32AndReferencesForBiases) {
  Problem problem = problem_of(DType::f32, 64, 64, 64);
  EXPECT_EQ(plan_backward(problem, {}, kH200).kind, Kind::any);
  EXPECT_FALSE(plan_backward(problem, {}, kH200).finds_references);
  problem.fp32_products = Fp32Products::full;
  problem.mask.bias = {stand_in(3), DType::f32, {1, 1, 64, 64}};
  EXPECT_EQ(plan_backward(problem, {}, kH200).kind, Kind::precise);
  EXPECT_TRUE(plan_backward(problem, {}, kH200).finds_references);
  problem.q.dtype = problem.k.dtype = problem.v.dtype = DType::bf16;
  EXPECT_EQ(plan_backward(problem, {}, kH200).kind, Kind::any);
  EXPECT_TRUE(plan_backward(problem, {}, kH200).finds_references);
}

TEST(GeneralBackwardPlan, TheWorkspaceIsLinearInTheRows) {
  const auto bytes = [](std::int64_t n, const TensorView& d_bias) {
    return plan_backward(problem_of(DType::bf16, n, n, 64), d_bias, kH200).workspace.bytes;
  };
  const std::size_t one = bytes(1024, {}), two = bytes(2048, {});
  constexpr std::size_t kTaken = 256;  // a counter, and up to the next part
  EXPECT_EQ(two - kTaken, 2 * (one - kTaken));
  // Of every row of 8 heads Q and dO and four numbers, of every key of 4 heads K and V; rows have 16 bytes more. And
  // two sums of dQ, with a count for every 64 rows.
  EXPECT_EQ(one, std::size_t{2 * 1024} * (8 * (2 * 144 + 16) + 4 * 2 * 144 + 8 * 2 * 64 * 4) +
                     2 * 2 * 8 * 1024 / 64 * 4 + kTaken);
  // A gradient that is written as it is needs nothing; one that is summed, a number for every row of every head.
  EXPECT_EQ(bytes(1024, {stand_in(4), DType::f32, {1, 8, 1024, 1024}}), one);
  EXPECT_EQ(bytes(1024, {stand_in(4), DType::f32, {1, 1, 1, 1024}}), one + 2 * 8 * 1024 * 4);
  Problem packed = problem_of(DType::bf16, 300, 300, 64);
  packed.q.shape[0] = packed.k.shape[0] = packed.v.shape[0] = 1;
  packed.packed = Packed{{stand_in(5), DType::i32, {4}}, {stand_in(6), DType::i32, {4}}, 200, 200};
  const BackwardPlan plan = plan_backward(packed, {}, kH200);
  EXPECT_EQ(plan.head_rows, (300 / 128 + 3) * 128);
  EXPECT_EQ(plan.head_tiles, (300 / 128 + 3) * 4);
}

// Whatever the band: a row tile is walked exactly when one of its rows may see one of the keys.
TEST(GeneralBackwardWalk, RowTilesAreThoseThatSeeTheKeys) {
  constexpr int kRows = 70, kTileQ = 16;
  for (const int left : {0, 5, 40, 1000}) {
    for (const int right : {-3, 0, 20, 1000}) {
      for (const int diagonal : {-30, 0, 13}) {
        for (const int length : {0, 33, 90}) {
          const tile::RowBand band{left, right, diagonal, length};
          for (int first = 0; first < 96; first += 32) {
            const tile::TileRange range = tile::row_tiles_that_see(band, kRows, first, first + 32, kTileQ);
            for (int row = 0; row < kRows; ++row) {
              const int begin = std::max(band.begin(row), first), end = std::min(band.end(row), first + 32);
              const bool walked = row / kTileQ >= range.begin && row / kTileQ < range.end;
              EXPECT_TRUE(walked || begin >= end) << left << " " << right << " " << diagonal << " " << row;
            }
            EXPECT_LE(range.end, (kRows + kTileQ - 1) / kTileQ);
          }
        }
      }
    }
  }
}

TEST(GeneralBackwardWalk, SpansThatAllRowsSeeNeedNoMask) {
  const tile::KeyTiles tiles = tile::key_tiles(tile::TileLayout::places, {2, 4}, Grouping::consecutive, 32);
  const tile::RowBand causal{1 << 29, 0, 0, 90};
  EXPECT_TRUE(tile::sees_span(tiles, causal, 32, 63, 90));
  EXPECT_FALSE(tile::sees_span(tiles, causal, 32, 62, 90));
  EXPECT_FALSE(tile::sees_span(tiles, causal, 64, 95, 100));  // the last span is not whole
  const tile::KeyTiles fives = tile::key_tiles(tile::TileLayout::places, {3, 5}, Grouping::consecutive, 32);
  EXPECT_FALSE(tile::sees_span(fives, causal, 0, 63, 90));  // empty places
}

// Every (sequence, head, row tile, key tile) is added by one CTA, once.
TEST(GeneralBackwardWalk, EveryTileIsAddedOnceToABias) {
  BackwardParams params;
  params.sequences = 2;
  params.work.heads = tile::Divisor(3);
  params.row_tiles = 2;
  params.tile_units = 1;
  for (int broadcast = 0; broadcast < 16; ++broadcast) {
    BiasGradient& g = params.bias_gradient;
    const int full[4] = {2, 3, 200, 100};
    for (int dim = 0; dim < 4; ++dim) g.extent[dim] = (broadcast >> dim & 1) != 0 ? 1 : full[dim];
    g.sums_rows = broadcast >> 2 & 1;
    g.sums_keys = broadcast >> 3 & 1;
    std::map<std::tuple<int, int, int, int>, int> seen;
    for (int cta = 0; cta < bias_ctas(params); ++cta) {
      const BiasPart part = bias_part(params, cta);
      for (int number = 0; number < part.tiles_of_rows; ++number) {
        const BiasPlace place = place_of_rows(part, number);
        for (int tile = part.key_tiles.begin; tile < part.key_tiles.end; ++tile) {
          ++seen[{place.sequence, place.head, place.row_tile, tile}];
        }
      }
    }
    EXPECT_EQ(seen.size(), 2u * 3 * 2 * 4) << broadcast;
    for (const auto& [place, count] : seen) EXPECT_EQ(count, 1);
  }
}

}  // namespace
}  // namespace dspattn::cuda::general::backward
