// Sums of V over blocks of keys that callers keep: what they are after a cache has grown, of pages, and what is
// refused.
#include "dspattn/value_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/tile/value_sums.h"

namespace dspattn {
namespace {

// V of one sequence and head: key j has the numbers j + 1 and -j.
struct Cache {
  std::int64_t n_k = 400;
  std::vector<float> v, sums = std::vector<float>(6 * 3, NAN);

  Cache() {
    for (std::int64_t j = 0; j < n_k; ++j) {
      v.push_back(static_cast<float>(j + 1));
      v.push_back(static_cast<float>(-j));
    }
  }
  ValueSumsArgs args(std::int64_t new_keys, const std::int32_t* length = nullptr) {
    ValueSumsArgs a;
    a.v = {v.data(), DType::f32, {1, 1, n_k, 2}};
    a.sums = {sums.data(), DType::f32, {1, 1, 6, 3}};
    a.new_keys = new_keys;
    if (length != nullptr) a.key_lengths = {length, DType::i32, {1}};
    return a;
  }
  // Row `row` of the sums is of keys [begin, end).
  void expect_row(int row, std::int64_t begin, std::int64_t end) const {
    float first = 0, second = 0;
    for (std::int64_t j = begin; j < end; ++j) {
      first += static_cast<float>(j + 1);
      second -= static_cast<float>(j);
    }
    const float* found = sums.data() + 3 * row;
    EXPECT_EQ(found[0], first) << "row " << row;  // integers: sums are exact
    EXPECT_EQ(found[1], second) << "row " << row;
    EXPECT_EQ(found[2], static_cast<float>(end - begin)) << "row " << row;
  }
};

TEST(ValueSums, OfACacheThatGrows) {
  Cache cache;
  std::int32_t length = 127;
  update_value_sums(cache.args(127, &length));
  EXPECT_TRUE(std::all_of(cache.sums.begin(), cache.sums.end(), [](float x) { return std::isnan(x); }));
  length = 128;
  update_value_sums(cache.args(1, &length));
  cache.expect_row(0, 0, 128);
  cache.expect_row(1, 0, 128);
  EXPECT_TRUE(std::isnan(cache.sums[2 * 3]));
  update_value_sums(cache.args(272));  // all 400: three whole blocks
  for (int block = 0; block < 3; ++block) {
    cache.expect_row(2 * block, 128 * block, 128 * block + 128);
    cache.expect_row(2 * block + 1, 0, 128 * block + 128);
  }
  cache.v[2 * 200] += 1;  // and replaced: what follows is brought up to date as well
  update_value_sums(cache.args(200));
  EXPECT_EQ(cache.sums[3 * 2], 128 * 129 / 2 + 128 * 128 + 1);
  EXPECT_EQ(cache.sums[3 * 5], 384 * 385 / 2 + 1);
}

TEST(ValueSums, OfPages) {
  Cache cache;
  const std::int32_t table[3] = {2, -1, 0};  // pages of 128 keys; one is missing
  ValueSumsArgs args = cache.args(384);
  args.v = {cache.v.data(), DType::f32, {3, 1, 128, 2}};
  args.block_table = {table, DType::i32, {1, 3}};
  update_value_sums(args);
  cache.expect_row(0, 256, 384);
  EXPECT_EQ(cache.sums[3 * 2 + 2], 0);  // no key
  cache.expect_row(4, 0, 128);
  EXPECT_EQ(cache.sums[3 * 5 + 2], 256);
  EXPECT_EQ(cache.sums[3 * 5], cache.sums[0] + cache.sums[3 * 4]);
}

std::string refusal(const ValueSumsArgs& args) {
  try {
    update_value_sums(args);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ValueSums, WrongCallsAreRefused) {
  Cache cache;
  const auto expect_named = [](const ValueSumsArgs& args, const char* text) {
    EXPECT_NE(refusal(args).find(text), std::string::npos) << refusal(args);
  };
  ValueSumsArgs args = cache.args(-1);
  expect_named(args, "new_keys: expected >= 0, got -1");
  args = cache.args(1);
  args.sums = {cache.sums.data(), DType::f32, {1, 1, 4, 3}};
  expect_named(args, "sums.shape[2]: expected an even number from 2 * (n_k / 128) = 6 on, got 4");
  args.sums = {cache.sums.data(), DType::f32, {1, 1, 6, 2}};
  expect_named(args, "sums.shape[3]: expected v's d_v + 1 = 3, got 2");
  args.sums = {cache.v.data(), DType::f32, {1, 1, 6, 3}};
  expect_named(args, "sums: ");
  const std::int32_t length = 401;
  expect_named(cache.args(1, &length), "key_lengths[0]: expected a length from 0 to the sequence's keys, 400, got 401");
}

TEST(ValueSums, ProblemsAreCheckedForThem) {
  Cache cache;
  std::vector<float> q(2), out(2);
  ForwardArgs args;
  args.problem.q = {q.data(), DType::f32, {1, 1, 1, 2}};
  args.problem.k = args.problem.v = {cache.v.data(), DType::f32, {1, 1, cache.n_k, 2}};
  args.problem.value_sums = {cache.sums.data(), DType::f32, {1, 1, 6, 3}};
  args.out = {out.data(), DType::f32, {1, 1, 1, 2}};
  const auto reason = [&] { return try_forward(args).message(); };
  EXPECT_NE(reason().find("value_sums: expected none with rest = drop, got some"), std::string::npos) << reason();
  args.problem.rest = Rest::mean;
  EXPECT_EQ(reason(), "");
  args.problem.value_sums.shape[2] = 5;
  EXPECT_NE(reason().find("value_sums.shape[2]"), std::string::npos) << reason();
}

namespace tile = cuda::tile;

// Every block that a key may lie in is counted.
TEST(ValueSums, BlocksOfNewKeys) {
  for (int new_keys = 0; new_keys < 400; ++new_keys) {
    int most = 0;
    for (int length = 0; length <= 1000; ++length) {
      const tile::KeyBlockRange blocks = tile::blocks_to_sum(length, new_keys);
      EXPECT_EQ(blocks.end, length / 128);
      EXPECT_LE(blocks.begin * 128, std::max(length - new_keys, 0));
      most = std::max(most, blocks.end - blocks.begin);
    }
    EXPECT_GE(tile::most_blocks_to_sum(1000, new_keys), most) << new_keys;
    EXPECT_LE(tile::most_blocks_to_sum(1000, new_keys), most + 1) << new_keys;
  }
}

TEST(ValueSums, PartsOfARowsMean) {
  const tile::MeanParts prefix = tile::mean_parts({0, 300});
  EXPECT_EQ(prefix.first_row, 3);
  EXPECT_EQ(prefix.rows, 1);
  const tile::MeanParts window = tile::mean_parts({100, 520});
  EXPECT_EQ(window.first_row, 2);
  EXPECT_EQ(window.rows, 3);
  EXPECT_EQ(window.before.end, 128);
  EXPECT_EQ(window.after.begin, 512);
  const tile::MeanParts none = tile::mean_parts({100, 200});
  EXPECT_EQ(none.rows, 0);
  EXPECT_EQ(none.before.begin, 100);
  EXPECT_EQ(none.before.end, 200);
  EXPECT_EQ(none.after.end - none.after.begin, 0);
}

}  // namespace
}  // namespace dspattn
