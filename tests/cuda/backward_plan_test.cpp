// Plans of the fused backward: tiles, items, sums and the workspace, which grows with the rows and not with their
// square.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/plan.h"

namespace dspattn::cuda::sm90::backward {
namespace {

const DeviceFacts kH200{.present = true, .major = 9, .multiprocessors = 132, .shared_bytes = 227 * 1024};

// Stands for a tensor that is never read.
void* stand_in(int index) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 40) * (1u + static_cast<unsigned>(index)));
}

Problem problem_of(std::int64_t batch, std::int64_t heads, std::int64_t kv_heads, std::int64_t n_q, std::int64_t n_k,
                   std::int64_t d) {
  Problem p;
  p.q = {stand_in(0), DType::bf16, {batch, heads, n_q, d}};
  p.k = {stand_in(1), DType::bf16, {batch, kv_heads, n_k, d}};
  p.v = {stand_in(2), DType::bf16, {batch, kv_heads, n_k, d}};
  return p;
}

BackwardPlan plan_of(const Problem& problem, int dim) {
  return plan_backward({DType::bf16, blocks::Selection::two_of_four, dim}, problem, kH200);
}

TEST(BackwardPlan, AnItemIsAKeyTileOfAKeyHead) {
  const BackwardPlan small = plan_of(problem_of(4, 8, 2, 1024, 1000, 64), 64);
  EXPECT_EQ(small.keys, 128);
  EXPECT_EQ(small.tile_q, 64);
  EXPECT_EQ(small.key_tiles, 8);
  EXPECT_EQ(small.items, 8 * 4 * 2);
  EXPECT_EQ(small.ctas, 64);
  EXPECT_EQ(small.query_tiles, 4 * 16);
  // Beyond d = 128 a key tile is half a block; a block that is begun has both halves.
  const BackwardPlan large = plan_of(problem_of(4, 8, 8, 1024, 1000, 256), 256);
  EXPECT_EQ(large.keys, 64);
  EXPECT_EQ(large.key_tiles, 16);
  EXPECT_EQ(large.ctas, 128);
}

// The kernels over rows run beside the main one: short problems leave them multiprocessors.
TEST(BackwardPlan, ShortProblemsLeaveMultiprocessorsToRows) {
  const BackwardPlan brief = plan_of(problem_of(16, 16, 16, 1024, 1024, 128), 128);
  EXPECT_EQ(brief.ctas, 128);
  EXPECT_EQ(brief.prepare_ctas, 132);
  const BackwardPlan lengthy = plan_of(problem_of(4, 16, 16, 4096, 4096, 128), 128);
  EXPECT_EQ(lengthy.ctas, 130);
  EXPECT_EQ(lengthy.prepare_ctas, 32);
  EXPECT_EQ(lengthy.finish_ctas, 4 * 132);
  // A device of few multiprocessors, too.
  const BackwardPlan few =
      plan_backward({DType::bf16, blocks::Selection::two_of_four, 128}, problem_of(16, 16, 16, 1024, 1024, 128),
                    {.present = true, .multiprocessors = 1});
  EXPECT_EQ(few.ctas, 1);
  EXPECT_EQ(few.prepare_ctas, 1);
}

// In runs of four keys of 16 bits, where groups are interleaved and there is a kernel for it.
TEST(BackwardPlan, BiasesAreCopiedWhereTheirRunsAreAligned) {
  Problem problem = problem_of(2, 4, 4, 1024, 1000, 128);
  EXPECT_FALSE(plan_of(problem, 128).bias_copied);
  const ConstTensorView bias{stand_in(5), DType::bf16, {2, 4, 1024, 1000}};
  problem.mask.bias = bias;
  for (const int dim : {64, 128, 192, 256}) EXPECT_EQ(plan_of(problem, dim).bias_copied, dim <= 128) << dim;
  problem.mask.bias = {stand_in(5), DType::bf16, {1, 1, 1, 1000}};
  EXPECT_TRUE(plan_of(problem, 64).bias_copied);
  problem.mask.bias.stride[2] = 1001;  // of a row alone
  EXPECT_TRUE(plan_of(problem, 64).bias_copied);
  const auto expect_read = [&](auto change) {
    Problem other = problem;
    other.mask.bias = bias;
    change(other);
    EXPECT_FALSE(plan_of(other, 64).bias_copied);
  };
  expect_read([](Problem& p) { p.grouping = Grouping::consecutive; });
  expect_read([](Problem& p) { p.mask.bias.dtype = DType::f32; });
  expect_read([](Problem& p) { p.mask.bias.data = static_cast<const std::byte*>(p.mask.bias.data) + 4; });
  expect_read([](Problem& p) { p.mask.bias.stride[2] = 1001; });
  expect_read([](Problem& p) { p.mask.bias.stride[3] = 2; });
  expect_read([](Problem& p) { p.mask.bias = {stand_in(5), DType::bf16, {2, 4, 1024, 1}}; });
}

TEST(BackwardPlan, WalksGoAroundWhereHeadsAreTooFewToTakeTurns) {
  Problem problem = problem_of(2, 4, 4, 1024, 1024, 128);
  EXPECT_TRUE(plan_of(problem, 128).wraps);
  problem.mask.window_left = 100;
  EXPECT_TRUE(plan_of(problem, 128).wraps);
  problem.mask.causal = true;
  EXPECT_FALSE(plan_of(problem, 128).wraps);
  EXPECT_FALSE(plan_of(problem_of(2, 4, 4, 64, 1024, 128), 128).wraps);  // one query tile
}

// As many heads at a time as a third of the cache holds, 8 bytes for every row and column of a query head.
TEST(BackwardPlan, HeadsTakeTurnsWithoutADiagonal) {
  const auto expect = [](const Problem& problem, int dim, bool wraps, int group) {
    const BackwardPlan plan = plan_of(problem, dim);
    EXPECT_EQ(plan.wraps, wraps);
    EXPECT_EQ(plan.head_group, group);
  };
  expect(problem_of(16, 16, 16, 1024, 1024, 128), 128, false, 17);
  expect(problem_of(16, 16, 4, 1024, 1024, 128), 128, false, 4);
  expect(problem_of(16, 32, 32, 1024, 1024, 64), 64, false, 34);
  expect(problem_of(8, 16, 16, 2048, 2048, 128), 128, true, 1);  // 16 CTAs of a head at a time
  expect(problem_of(4, 32, 32, 4096, 4096, 64), 64, true, 1);
  expect(problem_of(1, 16, 16, 16384, 16384, 128), 128, true, 1);
}

// As many as there, but two at least, and at most twice the heads that 132 CTAs work on.
TEST(BackwardPlan, HeadsTakeTurnsUnderADiagonal) {
  Problem problem = problem_of(4, 32, 32, 4096, 4096, 64);
  problem.mask.causal = true;
  EXPECT_EQ(plan_of(problem, 64).head_group, 8);
  problem = problem_of(1, 16, 16, 16384, 16384, 128);
  problem.mask.causal = true;
  EXPECT_EQ(plan_of(problem, 128).head_group, 2);
  problem = problem_of(4, 16, 16, 4096, 4096, 128);
  problem.mask.causal = true;
  EXPECT_EQ(plan_of(problem, 128).head_group, 4);
  problem = problem_of(32, 32, 32, 512, 512, 64);
  problem.mask.causal = true;
  EXPECT_EQ(plan_of(problem, 64).head_group, 66);
}

// Where a CTA has more than one item, and they differ in length.
TEST(BackwardPlan, TheLongestWalksOfTheLastHeadsComeFirstUnderADiagonal) {
  Problem problem = problem_of(4, 16, 16, 4096, 4096, 128);
  EXPECT_FALSE(plan_of(problem, 128).last_ascends);
  problem.mask.causal = true;
  EXPECT_TRUE(plan_of(problem, 128).last_ascends);
  EXPECT_NE(to_string(plan_of(problem, 128)).find("the first keys first"), std::string::npos);
  problem = problem_of(1, 4, 4, 4096, 4096, 128);
  problem.mask.causal = true;
  EXPECT_FALSE(plan_of(problem, 128).last_ascends);  // 128 items, 132 multiprocessors
}

TEST(BackwardPlan, TheWorkspaceIsLinearInTheRows) {
  Problem one = problem_of(1, 2, 2, 1024, 1024, 64), two = problem_of(1, 2, 2, 2048, 2048, 64);
  const std::size_t bytes = plan_of(one, 64).scratch.bytes;
  // Of every row Q and dO in 16 bits, two sums of dQ in 32, a log-sum-exp and D, twice.
  EXPECT_GE(bytes, std::size_t{2} * 1024 * (64 * (2 + 2 + 8) + 12));
  EXPECT_LE(bytes, std::size_t{2} * 1024 * (64 * (2 + 2 + 8) + 12) + 4096);
  EXPECT_LE(plan_of(two, 64).scratch.bytes, 2 * bytes);
  one.mask.causal = two.mask.causal = true;
  EXPECT_LT(plan_of(one, 64).scratch.bytes, bytes);
  // Of a packed batch it is the rows that count, not sequences times the longest.
  Problem packed = problem_of(1, 2, 2, 4096, 4096, 64);
  packed.packed = Packed{{stand_in(3), DType::i32, {65}}, {stand_in(4), DType::i32, {65}}, 4096, 4096};
  EXPECT_EQ(plan_of(packed, 64).query_tiles, 4096 / 64 + 64 + 1);
}

// With a boolean mask too: its bits are there for kMaskColumns keys at a time, which is 512 bytes a row.
TEST(BackwardPlan, TheWorkspaceOfAMaskIsLinearInTheRows) {
  const auto plan_with_mask = [](std::int64_t n, std::int64_t mask_heads) {
    Problem problem = problem_of(2, 4, 4, n, n, 64);
    problem.mask.allowed = {stand_in(3), DType::b8, {2, mask_heads, n, n}};
    return plan_of(problem, 64);
  };
  for (const std::int64_t heads : {1, 4}) {
    for (std::int64_t n = 4096; n <= 65536; n *= 2) {
      const BackwardPlan one = plan_with_mask(n, heads), two = plan_with_mask(2 * n, heads);
      EXPECT_LE(two.scratch.bytes, 2 * one.scratch.bytes) << n;
      const std::size_t without = plan_of(problem_of(2, 4, 4, n, n, 64), 64).scratch.bytes;
      EXPECT_LE(one.scratch.bytes, without + static_cast<std::size_t>(2 * heads * n * kMaskColumns / 8) + 4096) << n;
      EXPECT_EQ(one.launches(), n / kMaskColumns);
    }
  }
  EXPECT_EQ(plan_with_mask(4097, 1).launches(), 2);
  EXPECT_EQ(plan_with_mask(100, 1).launches(), 1);
  EXPECT_EQ(plan_of(problem_of(2, 4, 4, 65536, 65536, 64), 64).launches(), 1);
}

// Walks of the last heads that go the other way add their shares from the first key tile up, which is in the last
// launch.
TEST(BackwardPlan, WithSeveralLaunchesTheLastKeysComeFirstEverywhere) {
  Problem problem = problem_of(4, 16, 16, 8192, 8192, 128);
  problem.mask.causal = true;
  EXPECT_TRUE(plan_of(problem, 128).last_ascends);
  problem.mask.allowed = {stand_in(3), DType::b8, {1, 1, 8192, 8192}};
  EXPECT_FALSE(plan_of(problem, 128).last_ascends);
}

TEST(BackwardPlan, PartsOfTheWorkspaceDoNotOverlap) {
  const BackwardPlan plan = plan_of(problem_of(3, 5, 5, 100, 300, 128), 128);
  const std::size_t tiles = static_cast<std::size_t>(plan.query_tiles) * 5;
  const ScratchOffsets& at = plan.scratch;
  EXPECT_LE(at.taken + 4, at.prepared);
  EXPECT_LE(at.prepared + 4, at.finished);
  EXPECT_LE(at.finished + 4, at.ready);
  EXPECT_LE(at.ready + std::size_t{3} * 5 * 4, at.counts);
  EXPECT_LE(at.counts + 2 * tiles * 4, at.q);
  EXPECT_LE(at.q + tiles * 64 * 128 * 2, at.d_out);
  EXPECT_LE(at.d_out + tiles * 64 * 128 * 2, at.numbers);
  EXPECT_LE(at.numbers + tiles * (64 * 8 + kMarkCopies * 4), at.sums);
  EXPECT_LE(at.sums + 2 * tiles * 64 * 128 * 4, at.bytes);
  for (const std::size_t offset :
       {at.taken, at.prepared, at.finished, at.ready, at.counts, at.q, at.d_out, at.numbers, at.sums}) {
    EXPECT_EQ(offset % 256, 0u);
  }
  // Those that begin with 0 are one range.
  EXPECT_EQ(at.counters, at.taken);
  EXPECT_GE(at.counters + at.counter_bytes, at.counts + 2 * tiles * 4);
  EXPECT_LE(at.counters + at.counter_bytes, at.q);
}

TEST(BackwardPlan, SaysWhatItDoes) {
  const std::string text = to_string(plan_of(problem_of(2, 4, 4, 1024, 1024, 128), 128));
  EXPECT_NE(text.find("two sums"), std::string::npos) << text;
  EXPECT_NE(text.find("64 CTAs of 384 threads"), std::string::npos) << text;
}

// What a lane loads of a tile's numbers, 16 bytes at a time, is what its accumulators ask for.
TEST(BackwardPlan, LanesLoadNumbersInTheOrderOfTheirAccumulators) {
  for (int t = 0; t < 4; ++t) {
    for (int j = 0; j < 8; ++j) {
      for (int h = 0; h < 2; ++h) {
        const int row = 8 * j + 2 * t + h;
        EXPECT_EQ(lse_place(row), 16 * (j / 2) + 4 * t + 2 * (j % 2) + h);
        EXPECT_EQ(d_place(row, 1), row);
        EXPECT_EQ(d_place(row, 2), 16 * j + 4 * t + h);
      }
    }
  }
}

}  // namespace
}  // namespace dspattn::cuda::sm90::backward
