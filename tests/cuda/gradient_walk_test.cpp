// Which query tiles see a key block, and the order in which shares of dQ are added: all pairs are met once, waits are
// for lower items only, and every count is reached.
#include "cuda/tile/gradient_walk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace dspattn::cuda::tile {
namespace {

struct Case {
  int rows, keys, tile_q, parts;
  RowBand band;
  bool wraps;
};

Case draw(std::mt19937& random) {
  const auto number = [&](int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); };
  Case drawn{};
  drawn.rows = 1 + number(900);
  drawn.keys = 1 + number(900);
  drawn.tile_q = number(2) == 0 ? 64 : 128;
  drawn.parts = 1 + number(2);
  drawn.band.left = number(3) > 0 ? kMaxRows : number(700) - 150;
  drawn.band.right = number(2) > 0 ? kMaxRows : number(2) == 0 ? 0 : number(700) - 150;
  drawn.band.diagonal = number(2) == 0 ? 0 : number(3) == 0 ? number(900) - 450 : drawn.keys - drawn.rows;
  drawn.band.key_length = number(3) > 0 ? drawn.keys : number(drawn.keys + 1);
  drawn.wraps = number(2) == 0;
  return drawn;
}

int tiles_of(const Case& drawn) { return divide_up(drawn.rows, drawn.tile_q); }
int last_row(const Case& drawn, int tile) { return std::min((tile + 1) * drawn.tile_q, drawn.rows) - 1; }

TEST(GradientWalk, QueryTilesAndKeyBlocksSeeEachOther) {
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) {
    const Case drawn = draw(random);
    for (int block = 0; block < divide_up(drawn.keys, kBlockKeys); ++block) {
      const TileRange tiles = query_tiles_of(drawn.band, drawn.rows, block, drawn.tile_q);
      for (int tile = 0; tile < tiles_of(drawn); ++tile) {
        const int first = tile * drawn.tile_q, last = last_row(drawn, tile);
        const KeyBlockRange seen = key_blocks_of(drawn.band, first, last);
        const bool met = tile >= tiles.begin && tile < tiles.end;
        EXPECT_EQ(met, block >= seen.begin && block < seen.end) << block << " " << tile;
        // Nothing that a row sees is left out.
        for (int row = first; row <= last; ++row) {
          const bool visible = std::max(drawn.band.begin(row), block * kBlockKeys) <
                               std::min(drawn.band.end(row), (block + 1) * kBlockKeys);
          EXPECT_TRUE(met || !visible) << "block " << block << ", row " << row;
        }
      }
    }
  }
}

TEST(GradientWalk, SharesOfLowerItemsComeFirstAndNoneIsMissing) {
  std::mt19937 random(2);
  for (int i = 0; i < 300; ++i) {
    const Case drawn = draw(random);
    const Divisor key_tiles(drawn.parts * divide_up(drawn.keys, kBlockKeys));
    const bool ascends = !drawn.wraps && i % 2 == 0;
    std::map<std::pair<int, int>, std::vector<int>> shares;  // (tile, sum): which turn each item in its order has
    for (int item = 0; item < key_tiles.value; ++item) {
      const GradientItem index = GradientItems{key_tiles, 1, 4, ascends}.item(item);
      ASSERT_EQ(index.ascends, ascends);
      ASSERT_EQ(index.sequence_head, 0);
      const int block = index.key_tile / drawn.parts, part = index.key_tile % drawn.parts;
      const TileRange tiles = query_tiles_of(drawn.band, drawn.rows, block, drawn.tile_q);
      const int first = first_of_walk(tiles, block, drawn.tile_q, drawn.wraps);
      std::set<int> walked;
      for (int step = 0; step < tiles.count(); ++step) {
        const int tile = tile_of_step(tiles, first, step);
        ASSERT_TRUE(tile >= tiles.begin && tile < tiles.end);
        walked.insert(tile);
        const KeyBlockRange seen = key_blocks_of(drawn.band, tile * drawn.tile_q, last_row(drawn, tile));
        const Turn turn = ascends ? ascending_turn_of(seen, block, part, drawn.parts)
                                  : turn_of(seen, tile, drawn.tile_q, block, part, drawn.parts, drawn.wraps);
        EXPECT_TRUE(drawn.wraps || turn.sum == 0);
        std::vector<int>& before = shares[{tile, turn.sum}];
        // The shares before it are those of items with lower numbers, all of them.
        EXPECT_EQ(turn.before, static_cast<int>(before.size())) << "item " << item << ", tile " << tile;
        before.push_back(item);
      }
      EXPECT_EQ(static_cast<int>(walked.size()), tiles.count());
    }
    for (int tile = 0; tile < tiles_of(drawn); ++tile) {
      const KeyBlockRange seen = key_blocks_of(drawn.band, tile * drawn.tile_q, last_row(drawn, tile));
      for (const int sum : {0, 1}) {
        EXPECT_EQ(shares_of(seen, tile, drawn.tile_q, drawn.parts, drawn.wraps, sum),
                  static_cast<int>(shares[std::pair(tile, sum)].size()));
      }
    }
  }
}

TEST(GradientWalk, InsideAreTheTilesAllOfWhoseRowsSeeTheWholeBlock) {
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) {
    const Case drawn = draw(random);
    for (int block = 0; block < divide_up(drawn.keys, kBlockKeys); ++block) {
      const TileRange inside = inside_tiles_of(drawn.band, drawn.rows, block, drawn.tile_q);
      for (int tile = 0; tile < tiles_of(drawn); ++tile) {
        const KeyBlockRange blocks = interior_key_blocks(drawn.band, tile * drawn.tile_q, last_row(drawn, tile));
        EXPECT_EQ(tile >= inside.begin && tile < inside.end, block >= blocks.begin && block < blocks.end)
            << "block " << block << ", tile " << tile;
      }
    }
  }
}

// Every key tile of every head is one item; of a head the last comes first, and the heads of a group take turns. The
// last group is a whole one, and where it ascends the first key tile of a head comes first.
TEST(GradientWalk, ItemsOfAGroupOfHeadsComeInTurn) {
  constexpr int kKeyTiles = 5;
  for (const auto& [heads, group] : {std::pair(1, 1), {6, 1}, {6, 3}, {7, 3}, {2, 5}}) {
    for (const bool last_ascends : {false, true}) {
      std::vector<int> taken(static_cast<std::size_t>(heads), 0);
      std::vector<int> last(static_cast<std::size_t>(heads), -1);
      for (int index = 0; index < kKeyTiles * heads; ++index) {
        const GradientItem item = GradientItems{Divisor(kKeyTiles), heads, group, last_ascends}.item(index);
        ASSERT_TRUE(item.sequence_head >= 0 && item.sequence_head < heads);
        const auto head = static_cast<std::size_t>(item.sequence_head);
        EXPECT_EQ(item.ascends, last_ascends && item.sequence_head >= heads - group);
        EXPECT_EQ(item.key_tile, item.ascends ? taken[head] : kKeyTiles - 1 - taken[head]);
        ++taken[head];
        const int behind = (heads - 1 - item.sequence_head) / group * group;  // heads of groups behind its own
        const int size = std::min(group, heads - behind);
        if (last[head] >= 0) {
          EXPECT_EQ(index - last[head], size);
        }
        last[head] = index;
      }
    }
  }
}

// At step s of their walks, no two key tiles of a head add to one sum, where every row sees all keys: nobody waits for
// more than the step before.
TEST(GradientWalk, WalksThatWrapMeetNoQueryTileTogether) {
  constexpr int kBlocks = 8;
  const RowBand band{kMaxRows, kMaxRows, 0, kBlocks * kBlockKeys};
  for (const int tile_q : {64, 128}) {
    const int rows = kBlocks * kBlockKeys;
    for (int step = 0; step < rows / tile_q; ++step) {
      std::set<std::pair<int, int>> met;
      for (int block = 0; block < kBlocks; ++block) {
        const TileRange tiles = query_tiles_of(band, rows, block, tile_q);
        const int tile = tile_of_step(tiles, first_of_walk(tiles, block, tile_q, true), step);
        met.insert({tile, 0});
      }
      EXPECT_EQ(met.size(), static_cast<std::size_t>(kBlocks));
    }
  }
}

TEST(GradientWalk, TilesOfPackedSequencesDoNotOverlap) {
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    const int tile_q = i % 2 == 0 ? 64 : 128;
    int begin = 0, end = 0;  // row, tile
    for (int sequence = 0; sequence < 40; ++sequence) {
      const int first = first_packed_tile(begin, sequence, tile_q);
      EXPECT_GE(first, end);
      const int count = static_cast<int>(random() % 300);
      end = first + divide_up(count, tile_q);
      begin += count;
    }
    EXPECT_LE(end, begin / tile_q + 40 + 1);  // what the workspace has room for
  }
}

TEST(GradientWalk, AThreadsShareOfASumIsItsAccumulator) {
  for (const int columns : {64, 128}) {
    std::set<std::pair<int, int>> elements;
    for (int thread = 0; thread < 128; ++thread) {
      for (int i = 0; i < columns / 2; ++i) {
        const int column = sum_column(i / 4, thread, i % 4), row = sum_row(thread, i % 4);
        EXPECT_EQ(column, accumulator_column(i, thread % 4));
        EXPECT_EQ(row, thread / 32 * 16 + accumulator_row(i, thread % 32));
        elements.insert({row, column});
      }
    }
    EXPECT_EQ(elements.size(), static_cast<std::size_t>(64 * columns));
  }
}

}  // namespace
}  // namespace dspattn::cuda::tile
