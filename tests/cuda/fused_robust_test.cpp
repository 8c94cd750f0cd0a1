// The fused forward where problems are at their limits: scores of ten thousands, equal scores, one key and none, NaN in
// q and k, mask tensors, warpgroups that see different keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "check/check.h"
#include "cuda/device/facts.h"
#include "cuda/fused_rows.h"
#include "cuda/sm90/forward/rows.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace {

using check::Case;

TEST_P(RobustRow, OneKey) {
  expect_right(row().problem(2, 130, 1));
  Case causal = row().problem(2, 130, 1);
  causal.causal = true;  // only the last query sees it
  expect_right(causal);
}

// Key blocks of which interleaved groups' first elements alone exist, up to the tensors' end.
TEST_P(RobustRow, HalfAKeyBlock) {
  for (const int n_k : {32, 64}) {
    expect_right(row().problem(3, 40, n_k));
    Case lengths = row().problem(1, 40, n_k);
    lengths.batch = 2;
    lengths.key_lengths = {n_k, n_k - 5};
    expect_right(lengths);
  }
}

TEST_P(RobustRow, NoKeys) {
  expect_right(row().problem(2, 130, 0));
  Case hidden = row().problem(2, 130, 200);
  hidden.key_lengths = {0};
  expect_right(hidden);
}

TEST_P(RobustRow, EqualScores) {
  Case drawn = row().problem(2, 40, 261);
  drawn.magnitude = 0;
  expect_right(drawn);
  drawn.causal = true;
  expect_right(drawn);
}

// q times 4096: scores of about +-12,000.
TEST_P(RobustRow, ScoresOfTenThousands) {
  Case drawn = row().problem(2, 70, 261);
  drawn.magnitude = 4096;
  expect_right(drawn);
  drawn.bias = check::Broadcast{};
  drawn.causal = true;
  expect_right(drawn);
}

TEST_P(RobustRow, ScoresOfHundreds) {
  Case drawn = row().problem(2, 70, 261);
  drawn.magnitude = 64;
  expect_right(drawn);
}

// Rows that see nothing but biases of the lowest finite number are not empty. Of fp16's lowest the kernel does not give
// the LSE: it counts scores below -65408 * 2^e as that (docs/fused_kernel.md, limits).
TEST_P(RobustRow, LowestBiases) {
  for (std::int64_t index = 0; index < 4; ++index) {
    Case drawn = row().problem(2, 150, index + 1);
    drawn.index = index;
    drawn.bias = check::Broadcast{};
    drawn.bias_dtype = index % 2 == 0 ? DType::f32 : drawn.dtype;
    drawn.want_lse = drawn.bias_dtype != DType::f16;
    drawn.lowest_bias = true;
    expect_right(drawn);
  }
}

// What lengths drawn at random seldom give: whole blocks of keys, aligned tensors, several items for every thread
// block, and warpgroups of an item that see fewer keys than others, or none.
TEST_P(RobustRow, WholeBlocksAndUnequalWarpgroups) {
  const Row of = row();
  expect_right(of.problem(3, 1, 128));
  Case shared_keys = of.problem(4, 130, 256);
  shared_keys.kv_heads = 2;
  shared_keys.d_v = of.dim - 8;
  expect_right(shared_keys);
  // Items of more tiles than a ring has stages; two row tiles, which a pair of CTAs may share, and three.
  expect_right(of.problem(5, 130, 640));
  expect_right(of.problem(2, 260, 512));
  // The diagonal passes between two warpgroups' rows; with a window, on either side.
  Case causal = of.problem(2, 320, 384);
  causal.causal = true;
  expect_right(causal);
  causal.window_left = 70;
  expect_right(causal);
  // The first 320 rows see nothing: whole items, and a warpgroup of the next.
  Case empty = of.problem(2, 576, 256);
  empty.causal = true;
  expect_right(empty);
  // The same with lengths that only the device knows.
  Case lengths = of.problem(1, 192, 384);
  lengths.batch = 5;
  lengths.key_lengths = {384, 0, 128, 250, 64};
  lengths.causal = true;
  expect_right(lengths);
  Case packed = of.problem(2, 320, 256);
  packed.packed = true;
  packed.batch = 4;
  packed.cu_q = {0, 320, 321, 421, 549};
  packed.cu_k = {0, 256, 384, 384, 446};
  packed.causal = true;
  expect_right(packed);
}

// Rows that see all keys, in items of which CTAs, or pairs of them, have two, some of them one.
TEST_P(RobustRow, MoreItemsThanPairs) {
  expect_as_few_at_a_time(row().problem(cuda::device_facts(0).multiprocessors / 2 + 1, 130, 384));
}

// Sequences that end within blocks of keys, long enough for pairs of CTAs: row tiles of one head, of two heads
// with keys in common and of two without, and sequences without keys, through which nobody waits for the other's loads.
TEST_P(RobustRow, LengthsInPairs) {
  Case packed = row().problem(2, 640, 150);
  packed.packed = true;
  packed.batch = 2;
  packed.cu_q = {0, 640, 1030};
  packed.cu_k = {0, 150, 150};
  expect_right(packed, false);
  packed.heads = 4;
  expect_right(packed, false);

  Case lengths = row().problem(2, 520, 140);
  lengths.batch = 2;
  lengths.key_lengths = {0, 129};
  expect_right(lengths, false);
  expect_right(row().problem(2, 500, 200), false);
  Case causal = row().problem(3, 250, 250);
  causal.causal = true;
  expect_right(causal, false);
}

// Every item ends within a block of keys, and CTAs, or pairs of them, have several: of one tile of keys, of
// fewer than a ring has stages, and of more.
TEST_P(RobustRow, ManySequencesThatEndWithinABlock) {
  const int multiprocessors = cuda::device_facts(0).multiprocessors;
  const auto expect_packed_right = [&](std::int32_t rows, const std::vector<std::int32_t>& lengths) {
    Case packed = row().problem(2, rows, *std::max_element(lengths.begin(), lengths.end()));
    packed.packed = true;
    packed.cu_q = packed.cu_k = {0};
    for (std::int64_t items = 0; items < 2 * multiprocessors || packed.batch < 4;
         items += packed.heads * ((rows + 127) / 128)) {
      packed.batch = static_cast<std::int64_t>(packed.cu_q.size());
      const std::int32_t length = lengths[packed.cu_q.size() % lengths.size()];
      packed.cu_q.push_back(packed.cu_q.back() + rows);
      packed.cu_k.push_back(packed.cu_k.back() + length);
    }
    expect_right(packed, false);
  };
  expect_packed_right(3, {70, 1, 129, 300, 127, 520, 257});
  expect_packed_right(513, {130, 70});
}

// Mask tensors whose rows TMA can read, which lengths drawn at random seldom allow, and rows it cannot, in
// every shape. 272 keys end within a block, 70 rows within a warpgroup's.
TEST_P(RobustRow, MaskTensors) {
  constexpr bool kOne = true, kAll = false;
  const check::Broadcast shapes[] = {{{kAll, kAll, kAll, kAll}},
                                     {{kOne, kOne, kAll, kAll}},
                                     {{kOne, kAll, kAll, kAll}},
                                     {{kAll, kOne, kOne, kAll}},
                                     {{kAll, kAll, kAll, kOne}}};
  int index = 0;
  for (const check::Broadcast& shape : shapes) {
    for (const std::int64_t keys : {272, 276, 271}) {
      Case drawn = row().problem(2, 70, keys);
      drawn.index = index++;
      drawn.causal = index % 4 == 0;
      if (index % 3 != 0) drawn.allowed = shape;
      if (index % 3 != 1) drawn.bias = shape;
      drawn.bias_dtype = index % 2 == 0 ? DType::f32 : drawn.dtype;
      expect_right(drawn);
    }
  }
}

// The second warpgroup does not see the first block, and the second block ends within: the warpgroups, the copies of
// the mask tensors and the copy of that block wait for each other in every way there is.
TEST_P(RobustRow, MaskTensorsBesideAWindow) {
  for (std::int64_t index = 0; index < 3; ++index) {
    Case drawn = row().problem(2, 128, 200);
    drawn.index = index;
    drawn.window_left = 5;
    if (index != 1) drawn.allowed = check::Broadcast{};
    if (index != 2) drawn.bias = check::Broadcast{};
    drawn.bias_dtype = DType::f32;
    expect_right(drawn);
  }
}

TEST_P(RobustRow, NaNInQAndK) {
  Case drawn = row().problem(2, 200, 300);
  drawn.nan_in_q = true;
  expect_right(drawn);
  drawn.causal = true;
  drawn.nan_in_k = true;
  expect_right(drawn);
}

std::vector<std::string> row_names() {
  std::vector<std::string> names;
  for (const core::KernelRow& row : cuda::sm90::fused_rows()) names.emplace_back(row.info.name);
  return names;
}

const auto kName = [](const ::testing::TestParamInfo<std::string>& row) { return row.param; };
INSTANTIATE_TEST_SUITE_P(Table, RobustRow, ::testing::ValuesIn(row_names()), kName);
INSTANTIATE_TEST_SUITE_P(Table, RobustBusy, ::testing::ValuesIn(row_names()), kName);
INSTANTIATE_TEST_SUITE_P(Two, RobustLarge, ::testing::Values("sm90_fused_2_4_bf16_d64", "sm90_fused_1_2_fp16_d128"),
                         kName);

}  // namespace
}  // namespace dspattn
