// The walk of the fused kernel: every item once, balanced; which blocks of keys are visible and which need no mask.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/geometry.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::tile {
namespace {

constexpr int kCtas = 132;  // one for each multiprocessor of an H200

void expect_every_item_once(const ItemOrder& order, int blocks) {
  const auto tiles = static_cast<std::size_t>(order.row_tiles.value);
  std::vector<int> times(static_cast<std::size_t>(order.sequence_heads) * tiles);
  for (int block = 0; block < blocks; ++block) {
    for (int turn = 0; turn < order.rounds; ++turn) {
      const ItemIndex place = item_of_round(order, turn, block);
      if (place.row_tile < 0) continue;
      ASSERT_LT(place.row_tile, order.row_tiles.value);
      ASSERT_LT(place.sequence_head, order.sequence_heads);
      ++times[static_cast<std::size_t>(place.sequence_head) * tiles + static_cast<std::size_t>(place.row_tile)];
    }
  }
  EXPECT_EQ(std::count(times.begin(), times.end(), 1), static_cast<std::ptrdiff_t>(times.size()));
}

TEST(TileWalk, TakesEveryItemOnce) {
  for (const int heads : {1, 2, 7, 40, 129, 512}) {
    for (const int tiles : {1, 2, 5, 22, 131}) {
      const int blocks = std::min(kCtas, heads * tiles);
      expect_every_item_once(equal_order(heads, tiles, blocks, false), blocks);
      expect_every_item_once(equal_order(heads, tiles, blocks, true), blocks);
      expect_every_item_once(mirrored_order(heads, tiles, blocks), blocks);
      expect_every_item_once(unequal_order(heads, tiles, 1, blocks, 128), blocks);
      expect_every_item_once(unequal_order(heads, tiles, 1, blocks, 192), blocks);
    }
  }
  expect_every_item_once(unequal_order(96, 8, 4, kCtas, 128), kCtas);
}

TEST(TileWalk, CountsTheItemsOfAThreadBlock) {
  for (const int heads : {1, 7, 129, 256}) {
    for (const int tiles : {1, 4, 5}) {
      const int blocks = std::min(kCtas / 2, heads * tiles);
      for (const bool short_last : {false, true}) {
        const ItemOrder order = equal_order(heads, tiles, blocks, short_last);
        for (int block = 0; block < blocks; ++block) {
          int items = 0;
          for (int turn = 0; turn < order.rounds; ++turn) {
            items += item_of_round(order, turn, block).row_tile >= 0 ? 1 : 0;
          }
          EXPECT_EQ(items_of_worker(order, block), items) << heads << " heads, " << tiles << " tiles, block " << block;
          EXPECT_GE(items, 1);
        }
      }
    }
  }
}

TEST(TileWalk, NeedsNoMoreWorkersThanForAsManyRounds) {
  for (const int items : {0, 1, 65, 66, 67, 132, 1000, 1024}) {
    const int needed = workers_needed(items, kCtas / 2);
    EXPECT_LE(needed, kCtas / 2);
    if (items == 0) {
      EXPECT_EQ(needed, 0);
      continue;
    }
    const int rounds = divide_up(items, kCtas / 2);
    EXPECT_EQ(divide_up(items, needed), rounds) << items;
    if (needed > 1) {
      EXPECT_GT(divide_up(items, needed - 1), rounds) << items;
    }
  }
  EXPECT_EQ(workers_needed(1024, 66), 64);
}

// Largest over mean number of key blocks a CTA has under a causal mask.
double causal_imbalance(const ItemOrder& order, int rows, int tile_q) {
  std::vector<double> load(kCtas);
  for (int block = 0; block < kCtas; ++block) {
    for (int turn = 0; turn < order.rounds; ++turn) {
      const ItemIndex place = item_of_round(order, turn, block);
      if (place.row_tile < 0) continue;
      load[static_cast<std::size_t>(block)] += divide_up(std::min((place.row_tile + 1) * tile_q, rows), kBlockKeys);
    }
  }
  return *std::max_element(load.begin(), load.end()) / (std::accumulate(load.begin(), load.end(), 0.0) / kCtas);
}

TEST(TileWalk, BalancesCausalWork) {
  for (const auto& [rows, dim] :
       {std::pair{1024, 64}, {4096, 64}, {16384, 64}, {1024, 128}, {4096, 128}, {16384, 128}}) {
    for (const int tile_q : {128, 192}) {
      const int heads = 16384 / rows * (2048 / dim);
      const int tiles = divide_up(rows, tile_q);
      EXPECT_LT(causal_imbalance(unequal_order(heads, tiles, 1, kCtas, tile_q), rows, tile_q), 1.075)
          << rows << " rows, d " << dim << ", " << tile_q;
    }
  }
  for (const int rows : {256, 512, 1024}) {
    const int tiles = rows / 128;
    EXPECT_LT(causal_imbalance(mirrored_order(16384 / rows * 16, tiles, kCtas), rows, 128), 1.05) << rows << " rows";
  }
}

// A head's last row tile may hold fewer rows and cost less: half, say. No CTA gets only whole ones.
TEST(TileWalk, DealsOutTheLastRowTiles) {
  for (const auto& [heads, tiles] : {std::pair{512, 6}, {1024, 3}, {128, 22}, {32, 86}, {300, 7}, {700, 133}}) {
    const ItemOrder order = equal_order(heads, tiles, kCtas, true);
    std::vector<double> load(kCtas);
    for (int block = 0; block < kCtas; ++block) {
      for (int turn = 0; turn < order.rounds; ++turn) {
        const ItemIndex place = item_of_round(order, turn, block);
        if (place.row_tile < 0) continue;
        load[static_cast<std::size_t>(block)] += place.row_tile == tiles - 1 ? 0.5 : 1.0;
      }
    }
    const double mean = std::accumulate(load.begin(), load.end(), 0.0) / kCtas;
    EXPECT_LE(*std::max_element(load.begin(), load.end()), mean + 0.5) << heads << " heads, " << tiles << " row tiles";
  }
}

TEST(TileWalk, HeadsThatShareKeysStayInOneSection) {
  const ItemOrder order = unequal_order(64, 32, 8, kCtas, 128);
  EXPECT_EQ(order.section_heads.value % 8, 0);
}

// Against the definition, row by row and key by key.
TEST(TileWalk, ClassifiesBlocksAsTheMaskDoes) {
  for (const int left : {0, 5, 130, kMaxRows}) {
    for (const int right : {0, 3, 200, kMaxRows}) {
      for (const int n_q : {1, 70, 300}) {
        for (const int n_k : {0, 1, 128, 300, 513}) {
          for (const int length : {0, 100, n_k}) {
            for (const bool bottom_right : {true, false}) {
              const RowBand band{left, right, bottom_right ? n_k - n_q : 0, std::min(length, n_k)};
              core::Band reference;
              reference.left = left;
              reference.right = right;
              reference.bottom_right = bottom_right;
              for (int first = 0; first < n_q; first += 64) {
                const int last = std::min(first + 63, n_q - 1);
                const KeyBlockRange visible = visible_key_blocks(band, first, last);
                const KeyBlockRange interior = interior_key_blocks(band, first, last);
                for (int row = first; row <= last; ++row) {
                  const core::KeyRange keys = reference.row(row, n_q, n_k, length);
                  if (keys.begin < keys.end) {
                    EXPECT_LE(visible.begin * kBlockKeys, keys.begin);
                    EXPECT_GE(visible.end * kBlockKeys, keys.end);
                  }
                  if (interior.begin < interior.end) {
                    EXPECT_GE(interior.begin * kBlockKeys, keys.begin);
                    EXPECT_LE(interior.end * kBlockKeys, keys.end);
                  }
                }
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace dspattn::cuda::tile
