// The order of items of sequences of different lengths: every item once, long ones first, all CTAs done at
// about the same time.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "cuda/tile/schedule.h"

namespace dspattn::cuda::tile {
namespace {

constexpr int kMultiprocessors = 132;  // of an H200

TEST(TileSchedule, TakesEveryItemOfASequenceOnce) {
  for (const int heads : {1, 6, 16, 32}) {
    for (const int row_tiles : {1, 2, 7, 30, 300}) {
      for (const int section : {0, section_heads_of(row_tiles, heads, 1, kMultiprocessors)}) {
        std::set<std::pair<int, int>> seen;
        for (int rank = 0; rank < heads * row_tiles; ++rank) {
          const ItemIndex place = item_of_sequence(3, rank, row_tiles, heads, section);
          ASSERT_GE(place.row_tile, 0);
          ASSERT_LT(place.row_tile, row_tiles);
          ASSERT_EQ(place.sequence_head / heads, 3);
          EXPECT_TRUE(seen.insert({place.sequence_head, place.row_tile}).second);
        }
        EXPECT_EQ(seen.size(), static_cast<std::size_t>(heads * row_tiles));
      }
    }
  }
}

TEST(TileSchedule, PairsTakeEveryRowTileOnce) {
  for (const int heads : {2, 6, 16}) {
    for (const int row_tiles : {1, 2, 3, 7, 30}) {
      std::set<std::pair<int, int>> seen;
      for (int rank = 0; rank < heads * row_tiles / 2; ++rank) {
        const ItemIndex first = pair_item_of_sequence(rank, row_tiles, heads, 0);
        const ItemIndex second = pair_item_of_sequence(rank, row_tiles, heads, 1);
        for (const ItemIndex& place : {first, second}) {
          ASSERT_TRUE(place.row_tile >= 0 && place.row_tile < row_tiles);
          ASSERT_TRUE(place.sequence_head >= 0 && place.sequence_head < heads);
          EXPECT_TRUE(seen.insert({place.sequence_head, place.row_tile}).second);
        }
        // The same head's keys, but for the last row tiles of an odd number.
        EXPECT_EQ(first.sequence_head != second.sequence_head, row_tiles % 2 == 1 && first.row_tile == row_tiles - 1);
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(heads * row_tiles));
    }
  }
}

TEST(TileSchedule, HeadsThatShareKeysStayInOneSection) {
  for (const int row_tiles : {1, 5, 32, 200}) {
    const int section = section_heads_of(row_tiles, 64, 8, kMultiprocessors);
    EXPECT_EQ(section % 8, 0);
    EXPECT_GE(section, 8);
    EXPECT_LE(section, 64);
  }
}

TEST(TileSchedule, LongerSequencesComeNoLater) {
  for (const int longest : {1, 100, 1024, 4096, 1 << 20, kMaxRows}) {
    const int shift = bucket_shift(longest);
    EXPECT_EQ(bucket_of(0, shift), kBuckets - 1);
    EXPECT_GE(bucket_of(longest, shift), 0);
    for (int keys = 1; keys <= longest; keys += 1 + longest / 1000) {
      EXPECT_LE(bucket_of(keys, shift), bucket_of(keys - 1, shift));
    }
  }
}

// Random lengths of 128 to 4096, 16384 tokens, as CTAs take them one after the other; an item costs as many
// steps as it sees blocks of keys, and one more.
TEST(TileSchedule, BalancesRandomLengths) {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    std::vector<int> lengths;
    for (int left = 16384; left > 0; left -= lengths.back()) {
      lengths.push_back(std::min(left, 128 + static_cast<int>(random() % 3969)));
    }
    std::sort(lengths.begin(), lengths.end(), std::greater<>());
    for (const int heads : {16, 32}) {
      for (const bool causal : {false, true}) {
        std::vector<int> busy(kMultiprocessors);
        for (const int length : lengths) {
          const int tiles = divide_up(length, 128);
          const int section = causal ? section_heads_of(tiles, heads, 1, kMultiprocessors) : 0;
          for (int rank = 0; rank < heads * tiles; ++rank) {
            const ItemIndex place = item_of_sequence(0, rank, tiles, heads, section);
            const int seen = causal ? std::min((place.row_tile + 1) * 128, length) : length;
            *std::min_element(busy.begin(), busy.end()) += divide_up(seen, kBlockKeys) + 1;
          }
        }
        const double mean = std::accumulate(busy.begin(), busy.end(), 0.0) / kMultiprocessors;
        EXPECT_GT(mean / *std::max_element(busy.begin(), busy.end()), 0.96) << "round " << round << ", " << heads;
      }
    }
  }
}

}  // namespace
}  // namespace dspattn::cuda::tile
