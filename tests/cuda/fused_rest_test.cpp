// The fused forward with rest = mean: a row of every kind, by what it sees. Judged against the oracle, with mask
// tensors and without.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check/case_data.h"
#include "check/check.h"
#include "check/random.h"
#include "cuda/fused_rows.h"
#include "cuda/sm90/common/variant.h"
#include "cuda/sm90/forward/rows.h"

namespace dspattn {
namespace {

using check::Case;

class RestRow : public Robust {
 protected:
  Case problem(std::int64_t heads, std::int64_t n_q, std::int64_t n_k) const {
    Case drawn = row().problem(heads, n_q, n_k);
    drawn.rest = Rest::mean;
    return drawn;
  }
};

// Whole blocks and none, in a block and beyond it; heads that share keys.
TEST_P(RestRow, FullAndCausal) {
  expect_right(problem(1, 20, 261));
  expect_right(problem(1, 20, 77), false);
  Case causal = problem(2, 140, 140);
  causal.kv_heads = 1;
  causal.causal = true;
  expect_right(causal, false);
  causal.offset = -3;
  causal.n_q = 20;
  for (const std::int64_t n_k : {280, 1300}) {  // one batch of blocks, and two (blocks/prefix_means.cu)
    causal.n_k = n_k;
    expect_right(causal, false);
  }
}

// Queries enough for three warpgroups, where there are such kernels, and tiles of keys of which nothing is hidden: in
// the loop for these weights of pruned keys are coarse (tile/coarse_exp2.h). References are raised there too.
TEST_P(RestRow, ManyQueries) {
  Case drawn = problem(1, 520, 450);
  drawn.d_v = 8;  // the oracle takes its time
  expect_right(drawn, false);
  drawn.n_k = 384;
  expect_right(drawn, false);
  drawn.magnitude = 12;
  expect_right(drawn, false);
}

// Windows narrower than two blocks, whose rows have means of their own, and wider ones.
TEST_P(RestRow, Windows) {
  for (const std::int64_t left : {20, 140, 300}) {
    Case drawn = problem(1, 90, 420);
    drawn.window_left = left;
    drawn.window_right = left / 2;
    expect_right(drawn, left == 140);
    drawn.n_k = 90;
    expect_right(drawn, false);
  }
}

// NaN in V past a sequence's keys reaches nothing.
TEST_P(RestRow, Lengths) {
  Case lengths = problem(1, 20, 384);
  lengths.batch = 4;
  lengths.key_lengths = {384, 0, 100, 300};
  lengths.nan_past_length = true;
  expect_right(lengths);
  lengths.causal = true;
  lengths.window_left = 290;
  expect_right(lengths, false);
  Case packed = problem(2, 140, 200);
  packed.packed = true;
  packed.batch = 4;
  packed.cu_q = {0, 140, 141, 161, 171};
  packed.cu_k = {0, 200, 328, 328, 390};
  packed.causal = true;
  expect_right(packed, false);
}

// Masks with one query row, of all heads and of each; keys that they hide are in no mean.
TEST_P(RestRow, MasksWithOneQueryRow) {
  for (std::int64_t index = 0; index < 3; ++index) {
    Case drawn = problem(2, 20, 272);
    drawn.index = index;
    drawn.causal = index == 1;
    if (index != 1) drawn.allowed = check::Broadcast{{true, index == 0, true, false}, {}};
    if (index != 0) drawn.bias = check::Broadcast{{true, false, true, false}, {}};
    drawn.bias_dtype = index == 1 ? DType::f32 : drawn.dtype;
    expect_right(drawn, false);
  }
}

// V of a key that a mask hides from every query: whatever it holds, the results have the same bits.
TEST_P(RestRow, NanOfAHiddenKeyReachesNothing) {
  constexpr std::int64_t kQueries = 70, kKeys = 300, kHidden = 200;
  check::Random random(4, 2);
  const auto tensor = [&](DType dtype, std::array<std::int64_t, 4> shape) {
    check::Tensor made(gpu_memory(), check::laid_out(dtype, shape, check::Layout::bhnd));
    made.fill([&](auto...) { return random.bell(); });
    made.upload();
    return made;
  };
  const Row of = row();
  const check::Tensor q = tensor(of.dtype, {1, 1, kQueries, of.dim}), k = tensor(of.dtype, {1, 1, kKeys, of.dim});
  check::Tensor v = tensor(of.dtype, {1, 1, kKeys, of.dim}), out = tensor(of.dtype, {1, 1, kQueries, of.dim});
  check::Tensor allowed = tensor(DType::b8, {1, 1, 1, kKeys});
  allowed.fill([](std::int64_t, std::int64_t, std::int64_t, std::int64_t key) { return key == kHidden ? 0.0 : 1.0; });
  allowed.upload();
  const auto bits_with = [&](double value, Grouping grouping) {
    for (std::int64_t c = 0; c < of.dim; ++c) v.set(value, 0, 0, kHidden, c);
    v.upload();
    ForwardArgs args;
    args.problem.device = kGpu;
    args.problem.q = q.device_view();
    args.problem.k = k.device_view();
    args.problem.v = v.device_view();
    args.problem.mask.allowed = allowed.device_view();
    args.problem.pattern = of.pattern;
    args.problem.grouping = grouping;
    args.problem.rest = Rest::mean;
    args.out = out.device_view();
    check::library_runner(gpu_memory(), of.name, {}).forward(args);
    out.download();
    return out.bytes();
  };
  for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
    const auto plain = bits_with(0, grouping);
    EXPECT_TRUE(std::isfinite(out.at(0, 0, kQueries - 1, of.dim - 1)));
    EXPECT_TRUE(bits_with(std::numeric_limits<double>::quiet_NaN(), grouping) == plain) << to_string(grouping);
  }
}

// References that are raised, and those that fp16 is too coarse for.
TEST_P(RestRow, LargeScores) {
  Case drawn = problem(1, 20, 261);
  drawn.magnitude = 64;
  expect_right(drawn, false);
  drawn.magnitude = 4096;
  drawn.causal = true;
  expect_right(drawn, false);
}

// More items than CTAs, and in pairs, for which keys are three blocks.
TEST_P(RestRow, MoreItemsThanPairs) {
  const std::int64_t heads = cuda::device_facts(0).multiprocessors / 2 + 1;
  const bool pairs = cuda::sm90::mean_dim(static_cast<int>(row().dim)) == 128;
  Case drawn = problem(heads, 129, pairs ? 384 : 140);
  (pairs ? drawn.d : drawn.d_v) = 8;  // the oracle takes its time
  expect_as_few_at_a_time(drawn, false);
}

INSTANTIATE_TEST_SUITE_P(Table, RestRow, ::testing::ValuesIn(names_of(cuda::sm90::fused_rows())), name_of<std::string>);

}  // namespace
}  // namespace dspattn
