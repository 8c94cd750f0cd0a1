#include "dspattn/block_mask.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "dspattn/error.h"

namespace dspattn {
namespace {

TEST(BlockMask, ListsAreSortedAndPadded) {
  const BlockMask mask = make_block_mask(130, 200, 64, {{2, 0}, {}, {3, 1, 0}});
  EXPECT_EQ(mask.width, 3);
  EXPECT_EQ(mask.counts, (std::vector<std::int32_t>{2, 0, 3}));
  EXPECT_EQ(mask.columns, (std::vector<std::int32_t>{0, 2, -1, -1, -1, -1, 0, 1, 3}));
  EXPECT_TRUE(mask.allows(63, 130));
  EXPECT_FALSE(mask.allows(63, 64));
  EXPECT_FALSE(mask.allows(64, 0));
  EXPECT_DOUBLE_EQ(mask.density(), 5.0 / 12.0);
}

TEST(BlockMask, AsksOnlyForQueriesAndKeysThatThereAre) {
  BlockMask mask = make_block_mask(130, 200, 64, {{2, 0}, {}, {3, 1, 0}});
  EXPECT_THROW((void)mask.allows(130, 0), Error);
  EXPECT_THROW((void)mask.allows(-1, 0), Error);
  EXPECT_THROW((void)mask.allows(0, 200), Error);
  EXPECT_THROW((void)mask.allows(0, -1), Error);
  const BlockMask taken = std::move(mask);
  EXPECT_TRUE(taken.allows(129, 199));
  EXPECT_THROW((void)mask.allows(0, 0), Error);  // NOLINT: what is left is asked for on purpose
  EXPECT_THROW((void)make_block_mask(0, 0, 64, {}).allows(0, 0), Error);
}

TEST(BlockMask, RefusesWhatIsNotAMask) {
  EXPECT_THROW(make_block_mask(64, 64, 32, {{0}}), Error);
  EXPECT_THROW(make_block_mask(64, 64, 64, {{0}, {0}}), Error);
  EXPECT_THROW(make_block_mask(64, 64, 64, {{1}}), Error);
  EXPECT_THROW(make_block_mask(64, 64, 64, {{-1}}), Error);
  EXPECT_THROW(make_block_mask(64, 64, 64, {{0, 0}}), Error);
  EXPECT_THROW(bigbird_blocks(64, 64, {.random = -1}), Error);
}

TEST(BlockMask, AWindowMayBeTheLargestNumber) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const BlockMask mask = sliding_window_blocks(128, 640, {.block = 64, .window = kHuge});
  EXPECT_EQ(mask.counts, (std::vector<std::int32_t>{10, 10}));
  EXPECT_THROW(sliding_window_blocks(kHuge, 64, {}), Error);
  EXPECT_THROW(sliding_window_blocks(64, kHuge, {}), Error);
}

TEST(BlockMask, SlidingWindowFollowsTheBottomRightDiagonal) {
  const BlockMask square = sliding_window_blocks(640, 640, {.block = 64, .window = 1});
  for (std::int64_t row = 0; row < 10; ++row) {
    for (std::int64_t column = 0; column < 10; ++column) {
      EXPECT_EQ(square.allows(64 * row, 64 * column), std::abs(row - column) <= 1) << row << " " << column;
    }
  }
  const BlockMask wide = sliding_window_blocks(128, 640, {.block = 128, .window = 0});
  EXPECT_EQ(wide.columns, (std::vector<std::int32_t>{4}));
}

TEST(BlockMask, LongformerSeesAndIsSeenByGlobalBlocks) {
  const BlockMask mask = longformer_blocks(640, 640, {.block = 64, .window = 1, .global = 2});
  for (std::int64_t i = 0; i < 10; ++i) {
    EXPECT_TRUE(mask.allows(64, 64 * i));
    EXPECT_TRUE(mask.allows(64 * i, 64));
  }
  EXPECT_FALSE(mask.allows(64 * 9, 64 * 4));
}

// What a mask has none of is no member of what it is made of: given, it would be ignored.
template <class Parts>
concept HasGlobal = requires(Parts parts) {
  parts.global;
};
template <class Parts>
concept HasRandom = requires(Parts parts) {
  parts.random, parts.seed;
};

TEST(BlockMask, TakesNothingThatItIgnores) {
  static_assert(!HasGlobal<SlidingWindowParts> && !HasRandom<SlidingWindowParts>);
  static_assert(HasGlobal<LongformerParts> && !HasRandom<LongformerParts>);
  static_assert(HasGlobal<BigbirdParts> && HasRandom<BigbirdParts>);
  const std::vector<std::int32_t> window{2, 3, 2}, causal{1, 2, 2};
  EXPECT_EQ(sliding_window_blocks(192, 192, {}).counts, window);
  EXPECT_EQ(longformer_blocks(192, 192, {}).counts, window);
  EXPECT_EQ(sliding_window_blocks(192, 192, {.causal = true}).counts, causal);
  EXPECT_EQ(longformer_blocks(192, 192, {.causal = true}).counts, causal);
  EXPECT_EQ(longformer_blocks(256, 256, {.window = 0, .global = 1}).counts, (std::vector<std::int32_t>{4, 2, 2, 2}));
}

TEST(BlockMask, BigBirdAddsTheAskedNumberOfRandomBlocks) {
  const BlockMask mask = bigbird_blocks(4096, 4096, {.block = 64, .window = 1, .global = 1, .random = 3, .seed = 7});
  for (std::size_t row = 2; row < 63; ++row) EXPECT_EQ(mask.counts[row], 4 + 3) << row;
  EXPECT_EQ(mask.counts[0], 64);
  const BlockMask same = bigbird_blocks(4096, 4096, {.block = 64, .window = 1, .global = 1, .random = 3, .seed = 7});
  const BlockMask other = bigbird_blocks(4096, 4096, {.block = 64, .window = 1, .global = 1, .random = 3, .seed = 8});
  EXPECT_EQ(mask.columns, same.columns);
  EXPECT_NE(mask.columns, other.columns);
}

TEST(BlockMask, CausalLeavesOutBlocksRightOfTheDiagonal) {
  const BlockMask mask =
      bigbird_blocks(1024, 1024, {.block = 64, .window = 2, .global = 1, .random = 2, .causal = true});
  for (std::int64_t row = 0; row < 16; ++row) {
    for (std::int64_t column = row + 1; column < 16; ++column) EXPECT_FALSE(mask.allows(64 * row, 64 * column));
    EXPECT_TRUE(mask.allows(64 * row, 64 * row));
  }
}

std::uint64_t mix(std::uint64_t state) {
  state += 0x9E3779B97F4A7C15u;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
  return state ^ (state >> 31);
}

// The rule written out: every block is looked at, and the list of those that are left is shuffled.
std::vector<std::vector<std::int32_t>> rows_by_every_block(std::int64_t block_rows, std::int64_t block_columns,
                                                           const BigbirdParts& parts) {
  std::vector<std::vector<std::int32_t>> rows;
  for (std::int64_t row = 0; row < block_rows; ++row) {
    const std::int64_t diagonal = row + block_columns - block_rows;
    std::vector<std::int32_t> kept, rest;
    for (std::int64_t column = 0; column < block_columns && (!parts.causal || column <= diagonal); ++column) {
      const bool near = std::abs(column - diagonal) <= parts.window;
      const bool global = column < parts.global || row < parts.global;
      (near || global ? kept : rest).push_back(static_cast<std::int32_t>(column));
    }
    for (std::size_t i = 0; i < rest.size() && std::cmp_less(i, parts.random); ++i) {
      const std::uint64_t bits = mix(mix(parts.seed) ^ mix(static_cast<std::uint64_t>(row)) ^ (i + 1));
      std::swap(rest[i], rest[i + bits % (rest.size() - i)]);
      kept.push_back(rest[i]);
    }
    rows.push_back(kept);
  }
  return rows;
}

TEST(BlockMask, IsWhatLookingAtEveryBlockGives) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  std::uint64_t seed = 0;
  for (const auto& [n_q, n_k] :
       {std::pair{1024, 1024}, {640, 1300}, {1300, 640}, {1, 1}, {0, 500}, {500, 0}, {70, 64}}) {
    for (const std::int64_t window : {std::int64_t{0}, std::int64_t{1}, std::int64_t{5}, std::int64_t{30}, kHuge}) {
      for (const std::int64_t global : {std::int64_t{0}, std::int64_t{1}, std::int64_t{4}, kHuge}) {
        for (const std::int64_t random : {std::int64_t{0}, std::int64_t{1}, std::int64_t{3}, std::int64_t{9}, kHuge}) {
          for (const bool causal : {false, true}) {
            const BigbirdParts parts{64, window, global, random, seed++, causal};
            const BlockMask expected =
                make_block_mask(n_q, n_k, 64, rows_by_every_block((n_q + 63) / 64, (n_k + 63) / 64, parts));
            const BlockMask found = bigbird_blocks(n_q, n_k, parts);
            EXPECT_EQ(found.counts, expected.counts) << n_q << " " << n_k << " " << seed - 1;
            EXPECT_EQ(found.columns, expected.columns) << n_q << " " << n_k << " " << seed - 1;
          }
        }
      }
    }
  }
}

// 2^18 rows of as many columns: looking at each block would take minutes.
TEST(BlockMask, WorkIsByTheBlocksThatAreSet) {
  const std::int64_t length = std::int64_t{1} << 24;
  const BlockMask mask = bigbird_blocks(length, length, {.block = 64, .window = 1, .random = 3});
  EXPECT_EQ(mask.width, 6);
  EXPECT_EQ(mask.counts.size(), std::size_t{1} << 18);
  EXPECT_EQ(mask.counts[1000], 6);
}

TEST(BlockMask, EmptyLengthsAreFine) {
  EXPECT_EQ(bigbird_blocks(0, 0, {}).counts.size(), 0u);
  EXPECT_EQ(sliding_window_blocks(100, 0, {}).counts, (std::vector<std::int32_t>{0, 0}));
}

}  // namespace
}  // namespace dspattn
