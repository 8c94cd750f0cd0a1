// The general kernel's maps and selection, where there is no GPU: which key stands where in a tile (tile/key_tiles.h),
// which are kept (tile/select_any.h), which tiles rows see.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/half.h"
#include "cuda/blocks/random_state.h"
#include "cuda/ptx/near_tf32.h"
#include "cuda/tile/copy_steps.h"
#include "cuda/tile/group_rows.h"
#include "cuda/tile/key_row_lanes.h"
#include "cuda/tile/key_tiles.h"
#include "cuda/tile/select_any.h"
#include "dspattn/pattern.h"

namespace {

using namespace dspattn;
using namespace dspattn::cuda;
using tile::TileLayout;

constexpr Grouping kGroupings[] = {Grouping::consecutive, Grouping::interleaved};

// Every key of a row is in exactly one column of one tile, and a group's keys are in one tile, in lanes and order that
// selection counts on. kTileK columns.
template <TileLayout kLayout, int kTileK>
void expect_whole_groups(Pattern pattern, Grouping grouping) {
  const tile::KeyTiles tiles = tile::key_tiles(kLayout, pattern, grouping, kTileK);
  const int keys = 3 * tiles.span;
  std::vector<int> seen(static_cast<std::size_t>(keys), 0);
  for (int index = 0; index < 3 << tiles.parts_log2; ++index) {
    std::set<std::int64_t> groups;
    int present = 0;
    for (int column = 0; column < kTileK; ++column) {
      const int in_span = tile::key_of_column<kLayout, kTileK>(tiles, tiles.part(index), column);
      if (in_span < 0) continue;
      ASSERT_LT(in_span, tiles.span);
      const int key = tiles.first_key(index) + in_span;
      ++seen[static_cast<std::size_t>(key)];
      ++present;
      const KeyPlace place = place_of_key(key, pattern.group, grouping);
      groups.insert(place.group);
      if (kLayout == TileLayout::places && !pattern.is_dense()) {
        const int lane_place = (column >> 1 & 3) * (kTileK / 4) + 2 * (column >> 3) + (column & 1);
        EXPECT_EQ(lane_place & ((1 << tiles.places_log2) - 1), place.element);
      }
    }
    if (!pattern.is_dense()) {
      EXPECT_EQ(static_cast<int>(groups.size()) * pattern.group, present);
    }
  }
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }))
      << to_string(pattern) << " " << to_string(grouping);
}

// A thread that goes from its first row of tile 0 by steps comes to the rows that the maps say, of every tile.
template <TileLayout kLayout, int kTileK>
void expect_steps_to_lead(Pattern pattern, Grouping grouping) {
  constexpr std::int64_t kKBytes = 384, kVBytes = -128;
  const tile::KeyTiles tiles = tile::key_tiles(kLayout, pattern, grouping, kTileK);
  ASSERT_TRUE(tiles.is_filled());
  const tile::CopySteps k = tile::k_copy_steps<kLayout, kTileK>(tiles, kKBytes);
  const tile::CopySteps v = tile::v_copy_steps<kLayout, kTileK>(tiles, kVBytes);
  for (int first = 0; first < tile::CopySteps::kRowsApart; ++first) {
    std::int64_t k_at = kKBytes * tile::key_of_column<kLayout, kTileK>(tiles, 0, first);
    std::int64_t v_at = kVBytes * tile::key_of_v_row<kLayout, kTileK, false>(tiles, 0, first);
    for (int index = 0; index < 5; ++index) {
      const std::int64_t begin = tiles.first_key(index);
      const int part = tiles.part(index);
      for (int i = 0; i < kTileK / tile::CopySteps::kRowsApart; ++i) {
        const int row = first + i * tile::CopySteps::kRowsApart;
        EXPECT_EQ(k_at + k.row[i], kKBytes * (begin + tile::key_of_column<kLayout, kTileK>(tiles, part, row)));
        EXPECT_EQ(v_at + v.row[i], kVBytes * (begin + tile::key_of_v_row<kLayout, kTileK, false>(tiles, part, row)));
      }
      k_at += k.next[index & 1];
      v_at += v.next[index & 1];
    }
  }
}

TEST(CopySteps, LeadToTheRowsThatTheMapsSay) {
  for (const Grouping grouping : kGroupings) {
    for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}}) {
      expect_steps_to_lead<TileLayout::fours, 64>(pattern, grouping);
      expect_steps_to_lead<TileLayout::fours, 128>(pattern, grouping);
    }
    for (const Pattern pattern : {Pattern::dense(), Pattern{1, 4}, Pattern{4, 8}, Pattern{2, 16}}) {
      expect_steps_to_lead<TileLayout::places, 64>(pattern, grouping);
      expect_steps_to_lead<TileLayout::places, 128>(pattern, grouping);
    }
  }
}

TEST(KeyTiles, EveryKeyIsInOneColumnAndEveryGroupInOneTile) {
  for (const Grouping grouping : kGroupings) {
    for (int group = 1; group <= kMaxGroup; ++group) {
      if (grouping == Grouping::interleaved && kInterleaveBlock % group != 0) continue;
      expect_whole_groups<TileLayout::places, 64>({1, group}, grouping);
      expect_whole_groups<TileLayout::places, 32>({1, group}, grouping);
    }
    expect_whole_groups<TileLayout::fours, 64>({2, 4}, grouping);
    expect_whole_groups<TileLayout::fours, 64>({1, 2}, grouping);
    expect_whole_groups<TileLayout::pairs, 64>({1, 2}, grouping);
    expect_whole_groups<TileLayout::pairs, 32>({1, 2}, grouping);
  }
}

// Where keys are rows, a lane's four are a group of four, or two of two, in the order of the elements.
TEST(KeyTiles, RowsOfKeysGiveALaneWholeGroups) {
  std::set<int> columns;
  for (int row = 0; row < 32; ++row) columns.insert(tile::column_of_key_row(row));
  EXPECT_EQ(columns.size(), 32u);
  EXPECT_EQ(*columns.rbegin(), 31);
  for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}}) {
    for (const Grouping grouping : kGroupings) {
      const tile::KeyTiles tiles = tile::key_tiles(TileLayout::places, pattern, grouping, 32);
      for (int row = 0; row < 32; ++row) {
        const auto place = [&](int at) {
          return place_of_key(
              tile::key_of_column<TileLayout::places, 32>(tiles, tiles.part(1), tile::column_of_key_row(at)),
              pattern.group, grouping);
        };
        const int element = row / 8 % pattern.group;
        EXPECT_EQ(place(row).element, element);
        EXPECT_EQ(place(row).group, place(row - 8 * element).group);
      }
    }
  }
}

// Larger groups: neighbouring lanes, by their numbers, have neighbouring places.
TEST(KeyTiles, RowsOfKeysHaveLargerGroupsInNeighbouringLanes) {
  const tile::KeyTiles tiles = tile::key_tiles(TileLayout::places, {1, 32}, Grouping::consecutive, 32);
  for (int row = 0; row < 32; ++row) {
    const int number = tile::number_of_key_row_lane(row % 8);
    const int key = tile::key_of_column<TileLayout::places, 32>(tiles, 0, tile::column_of_key_row(row));
    EXPECT_EQ(key, 4 * number + row / 8);
    EXPECT_EQ(tile::key_row_lane_of_number(number), row % 8);
    for (int x = 1; x < 8; ++x) {
      EXPECT_EQ(tile::key_row_lane_of_number(number ^ x), row % 8 ^ tile::key_row_lane_of_number(x));
    }
  }
}

// A dense product's A operand has the scores of column c where V has its row: columns 2t, 2t + 1 of 16 bits; of tf32
// first 2t, then 2t + 1.
TEST(KeyTiles, RowsOfVFollowTheWeights) {
  const tile::KeyTiles tiles = tile::key_tiles(TileLayout::places, {3, 8}, Grouping::interleaved, 32);
  for (int part = 0; part < 4; ++part) {
    for (int step = 0; step < 4; ++step) {
      for (int t = 0; t < 4; ++t) {
        for (int i = 0; i < 2; ++i) {
          const int key = tile::key_of_column<TileLayout::places, 32>(tiles, part, 8 * step + 2 * t + i);
          EXPECT_EQ((tile::key_of_v_row<TileLayout::places, 32, true>(tiles, part, 8 * step + 4 * i + t)), key);
          EXPECT_EQ((tile::key_of_v_row<TileLayout::places, 32, false>(tiles, part, 8 * step + 2 * t + i)), key);
        }
      }
    }
  }
}

// The copy loop adds the keys of a row's bits.
TEST(KeyTiles, KeysOfFilledTilesAddUpBitByBit) {
  for (const Grouping grouping : kGroupings) {
    for (const int group : {1, 2, 4, 8, 16, 32}) {
      const tile::KeyTiles tiles = tile::key_tiles(TileLayout::places, {1, group}, grouping, 64);
      ASSERT_TRUE(tiles.is_filled());
      for (int row = 0; row < 64; ++row) {
        const auto key = [&](int of) { return tile::key_of_column<TileLayout::places, 64>(tiles, 0, of); };
        EXPECT_EQ(key(row), key(row & 15) + key(row & 48));
      }
    }
  }
}

TEST(KeyTiles, RangesAgreeWithWhatEveryRowSees) {
  for (const tile::KeyTiles& tiles : {tile::key_tiles(TileLayout::places, {2, 5}, Grouping::consecutive, 64),
                                      tile::key_tiles(TileLayout::fours, {2, 4}, Grouping::interleaved, 64),
                                      tile::key_tiles(TileLayout::places, {1, 8}, Grouping::consecutive, 32)}) {
    for (const int left : {0, 30, 1 << 29}) {
      for (const int diagonal : {-100, 0, 77}) {
        const tile::RowBand band{left, 0, diagonal, 300};
        for (int first = 0; first < 400; first += 64) {
          const tile::TileRange seen = tile::visible_tiles(tiles, band, first, first + 63);
          const tile::TileRange inside = tile::interior_tiles(tiles, band, first, first + 63);
          for (int span = 0; span * tiles.span < 400; ++span) {
            bool any = false, all = tiles.is_filled();
            for (int row = first; row < first + 64; ++row) {
              for (int key = span * tiles.span; key < (span + 1) * tiles.span; ++key) {
                const bool visible = key >= band.begin(row) && key < band.end(row);
                any = any || visible;
                all = all && visible;
              }
            }
            const int index = span << tiles.parts_log2;
            if (any) {
              EXPECT_TRUE(index >= seen.begin && index < seen.end);
            }
            EXPECT_EQ(index >= inside.begin && index < inside.end, all);
          }
        }
      }
    }
  }
}

// The contract's choice among the scores of a group.
std::vector<bool> expected(const std::vector<float>& scores, int keep) {
  std::vector<int> order(scores.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  std::vector<bool> kept(scores.size(), false);
  for (int i = 0; i < keep; ++i) kept[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] = true;
  return kept;
}

TEST(KeepLargest, IsTheContractsChoiceInEveryGroupOfALane) {
  std::mt19937 random(3);
  for (int places_log2 = 1; places_log2 <= 4; ++places_log2) {
    const int group = 1 << places_log2;
    for (int keep = 1; keep < group; ++keep) {
      for (int repeat = 0; repeat < 20; ++repeat) {
        std::array<float, 16> low{}, high{};
        std::uint32_t words[16];
        float single[16];
        for (std::size_t i = 0; i < 16; ++i) {  // few values: many ties
          low[i] = static_cast<float>(random() % 5) - 2.0f;
          high[i] = static_cast<float>(random() % 5) - 2.0f;
          words[i] = ptx::pack_f16x2(low[i], high[i]);
          single[i] = low[i];
        }
        const auto exchange = [](auto word, int) { return word; };
        tile::keep_largest<tile::PackedKeys>(words, keep, places_log2, 0, exchange);
        tile::keep_largest<tile::SingleKeys>(single, keep, places_log2, 0, exchange);
        for (int first = 0; first < 16; first += group) {
          const auto at = [&](const std::array<float, 16>& of) {
            return expected(std::vector<float>(of.begin() + first, of.begin() + first + group), keep);
          };
          const std::vector<bool> kept_low = at(low), kept_high = at(high);
          for (int i = 0; i < group; ++i) {
            const std::uint32_t kept = tile::is_kept<tile::PackedKeys>(words[first + i]);
            EXPECT_EQ((kept & 0xFFFFu) != 0, kept_low[static_cast<std::size_t>(i)]);
            EXPECT_EQ(kept >> 16 != 0, kept_high[static_cast<std::size_t>(i)]);
            EXPECT_EQ(tile::is_kept<tile::SingleKeys>(single[first + i]) != 0, kept_low[static_cast<std::size_t>(i)]);
          }
        }
      }
    }
  }
}

// What a tensor core leaves of it: tf32 numbers as they are, others nearly the nearest, on average as large as they
// were.
TEST(NearTf32, IsNearAndRightOnAverage) {
  const auto left = [](float x) { return std::bit_cast<float>(ptx::near_tf32(x) & 0xFFFFE000u); };
  std::mt19937 random(1);
  double sum = 0;
  constexpr int kCount = 100000;
  for (int i = 0; i < kCount; ++i) {
    const auto exponent = static_cast<std::uint32_t>(1 + i % 253);
    const auto x = std::bit_cast<float>((static_cast<std::uint32_t>(random()) & 0x807FFFFFu) | exponent << 23);
    const double error = static_cast<double>(left(x)) / static_cast<double>(x) - 1;
    EXPECT_LE(std::abs(error), 1.3101 * 0x1p-11) << x;
    sum += error;
    const auto tf32 = std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0xFFFFE000u);
    EXPECT_EQ(left(tf32), tf32);
  }
  EXPECT_LE(std::abs(sum / kCount), 0x1p-17);
  for (const float x : {0.0f, -0.0f, INFINITY, -INFINITY, 1.0f, std::bit_cast<float>(0x7F7FE000u)}) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(left(x)), std::bit_cast<std::uint32_t>(x));
  }
  for (const std::uint32_t nan : {0x7FFFFFFFu, 0x7FC00000u, 0xFFFFFFFFu}) {
    EXPECT_TRUE(std::isnan(left(std::bit_cast<float>(nan))));
  }
}

TEST(GroupRows, EveryHeadOfAPositionHasARow) {
  for (const int heads : {1, 2, 3, 5, 8, 11, 16}) {
    const tile::GroupRows rows = tile::group_rows(heads);
    int found = 0;
    for (int row = 0; row < 64; ++row) {
      if (!rows.exists(row)) continue;
      EXPECT_EQ(rows.position(row), found / heads);
      EXPECT_EQ(rows.head(row), found % heads);
      ++found;
    }
    EXPECT_EQ(found, heads * rows.positions(64));
  }
}

TEST(GroupRows, ManyHeadsAreCutIntoParts) {
  for (const int heads : {1, 16, 17, 32, 40, 71}) {
    const tile::GroupRows rows = tile::group_rows(heads);
    int found = 0;
    for (int part = 0; part < rows.parts(); ++part) {
      EXPECT_EQ(rows.part(part).rows_log2, rows.rows_log2);
      EXPECT_GT(rows.part(part).heads, 0);
      EXPECT_LE(rows.part(part).heads, 1 << rows.rows_log2);
      EXPECT_TRUE(part == 0 || rows.rows_log2 == 4) << "parts begin at multiples of 16";
      found += rows.part(part).heads;
    }
    EXPECT_EQ(found, heads);
  }
}

// Words in memory stand for the two numbers, whatever their stride.
TEST(RandomState, IsTheSameInMemory) {
  constexpr std::uint64_t kSeed = 0x89ABCDEF01234567u, kOffset = 0xFEDCBA9876543210u;
  const blocks::RandomState given{kSeed, kOffset, nullptr, 0};
  std::array<std::int32_t, 8> words{};
  for (std::size_t i = 0; i < 4; ++i) {
    words[2 * i] = static_cast<std::int32_t>((i < 2 ? kSeed : kOffset) >> (32 * (i % 2)));
  }
  const blocks::RandomState read{1, 2, words.data(), 2};
  EXPECT_EQ(read.row(3, 4, 5).state, core::DropoutRow::of(kSeed, kOffset, 3, 4, 5).state);
  EXPECT_EQ(given.row(3, 4, 5).state, read.row(3, 4, 5).state);
}

}  // namespace
