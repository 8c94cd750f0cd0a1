// Layout, selection and metadata of the fused tf32 kernel, on the host: the same functions the kernel is built from.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "cuda/tile/pair_map.h"

namespace dspattn::cuda::tile {
namespace {

constexpr int kTiles[] = {64, 32};

TEST(PairMap, PairsAreThoseOfTheContract) {
  for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
    for (const int tile_keys : kTiles) {
      const KeyMap map = pair_map(grouping, tile_keys);
      std::set<int> seen;
      for (int part = 0; part < kBlockKeys / tile_keys; ++part) {
        for (int pair = 0; pair < tile_keys / 2; ++pair) {
          const KeyPlace first = place_of_key(map.key(part, pair, 0), 2, grouping);
          const KeyPlace second = place_of_key(map.key(part, pair, 1), 2, grouping);
          EXPECT_EQ(first.group, second.group);
          EXPECT_EQ(first.element, 0);
          EXPECT_EQ(second.element, 1);
          EXPECT_TRUE(seen.insert(map.key(part, pair, 0)).second);
          EXPECT_TRUE(seen.insert(map.key(part, pair, 1)).second);
        }
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(kBlockKeys));
      EXPECT_EQ(*seen.rbegin(), kBlockKeys - 1);
    }
  }
}

// TMA fills each half of the K tile with one box: every group_step-th row from the first.
TEST(PairMap, HalvesOfTheKeyTileAreEvenlySpacedRows) {
  for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
    for (const int tile_keys : kTiles) {
      const KeyMap map = pair_map(grouping, tile_keys);
      for (int row = 0; row < tile_keys; ++row) {
        const Slot slot = pair_of_k_row(row, tile_keys);
        const int in_box = row % (tile_keys / 2);
        const int start = map.part_step + row / (tile_keys / 2) * map.pair_step;
        EXPECT_EQ(map.key(1, slot.group, slot.element), start + in_box * map.group_step);
      }
    }
  }
}

TEST(PairMap, OneLaneHoldsBothKeysOfAPair) {
  for (const int tile_keys : kTiles) {
    for (int t = 0; t < 4; ++t) {
      for (int j = 0; j < tile_keys / 16; ++j) {
        for (int i = 0; i < 2; ++i) {
          for (int e = 0; e < 2; ++e) {
            const int index = pair_register(j, i, e, tile_keys);
            EXPECT_EQ(accumulator_row(index, 4 * 5 + t), 5);
            EXPECT_EQ(accumulator_row(index + 2, 4 * 5 + t), 13);
            const Slot slot = pair_of_k_row(accumulator_column(index, t), tile_keys);
            EXPECT_EQ(slot.group, 8 * j + 2 * t + i);
            EXPECT_EQ(slot.element, e);
          }
        }
      }
    }
  }
}

// A sparse operand's register r of a step stands, in lane t, for the pair at columns 16 step + 8 (r / 2) + 2t of B.
TEST(PairMap, WeightsStandForTheirColumnsOfV) {
  for (int t = 0; t < 4; ++t) {
    for (int j = 0; j < 4; ++j) {
      for (int i = 0; i < 2; ++i) {
        for (int upper = 0; upper < 2; ++upper) {
          const int reg = weight_register(j, i, upper);
          EXPECT_EQ(reg % 2, upper);  // odd registers: row g + 8
          const int column = 16 * (reg / 4) + 8 * (reg % 4 / 2) + 2 * t;
          for (int e = 0; e < 2; ++e) {
            const Slot slot = pair_of_v_column(column + e);
            EXPECT_EQ(slot.group, 8 * j + 2 * t + i);
            EXPECT_EQ(slot.element, e);
          }
        }
      }
    }
  }
}

// A kept weight, its metadata and V meet: the product over a tile, by the tensor core's rules, is that of the kept
// keys.
TEST(PairMap, MetadataPicksTheKeptKey) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int tile_keys : kTiles) {
    for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
      const KeyMap map = pair_map(grouping, tile_keys);
      std::vector<float> scores(kBlockKeys);  // of rows g, by key
      std::vector<float> scores8(kBlockKeys);
      for (float& x : scores) x = std::round(2 * normal(random));  // with ties
      for (float& x : scores8) x = std::round(2 * normal(random));
      const int part = 1;
      for (int word = 0; word < tile_keys / 32; ++word) {
        std::array<std::uint32_t, 4> words, exchanged, metadata;
        std::array<std::array<KeptOfPair, 4>, 4> kept;
        for (int t = 0; t < 4; ++t) {
          std::uint32_t second[4];
          for (int p = 0; p < 4; ++p) {
            const auto at = [&](const std::vector<float>& row, int e) {
              const int column = accumulator_column(pair_register(2 * word + (p >> 1), p & 1, e, tile_keys), t);
              const Slot slot = pair_of_k_row(column, tile_keys);
              return row[static_cast<std::size_t>(map.key(part, slot.group, slot.element))];
            };
            const KeptOfPair pair = keep_one(at(scores, 0), at(scores, 1), at(scores8, 0), at(scores8, 1));
            kept[static_cast<std::size_t>(t)][static_cast<std::size_t>(p)] = pair;
            second[p] = pair.second;
          }
          words[static_cast<std::size_t>(t)] = metadata_of_pairs(second);
        }
        for (std::size_t t = 0; t < 4; ++t) {
          exchanged[t] = QuadTranspose::of_lane(static_cast<int>(t)).exchange_pairs(words[t], words[t ^ 1]);
        }
        for (std::size_t t = 0; t < 4; ++t) {
          metadata[t] = QuadTranspose::of_lane(static_cast<int>(t)).exchange_halves(exchanged[t], exchanged[t ^ 2]);
        }
        for (int p = 0; p < 4; ++p) {  // lane p describes 8 keys: even lanes the first half of a step
          for (int t = 0; t < 4; ++t) {
            for (int upper = 0; upper < 2; ++upper) {
              const std::uint32_t nibble = metadata[static_cast<std::size_t>(p)] >> (16 * upper + 4 * t) & 15;
              ASSERT_TRUE(nibble == 0x4 || nibble == 0xE);
              const int column = 16 * (2 * word + p / 2) + 8 * (p % 2) + 2 * t + (nibble == 0xE ? 1 : 0);
              const Slot slot = pair_of_v_column(column);
              const auto& row = upper == 0 ? scores : scores8;
              const float own = row[static_cast<std::size_t>(map.key(part, slot.group, slot.element))];
              const float other = row[static_cast<std::size_t>(map.key(part, slot.group, 1 - slot.element))];
              EXPECT_TRUE(own > other || (own == other && slot.element == 0));
              const KeptOfPair& pair = kept[static_cast<std::size_t>(t)][static_cast<std::size_t>(p)];
              EXPECT_EQ(upper == 0 ? pair.row0 : pair.row1, own);
            }
          }
        }
      }
    }
  }
}

TEST(PairMap, KeepsTheLargerWithTiesAndNan) {
  const float kInf = std::numeric_limits<float>::infinity();
  const float values[] = {-kInf, -1.5f, -0.0f, 0.0f, 2.0f, 0x1p-140f, kInf};
  for (const float a : values) {
    for (const float b : values) {
      const KeptOfPair kept = keep_one(a, b, b, a);
      EXPECT_EQ(kept.row0, b > a ? b : a);
      EXPECT_EQ(kept.row1, a > b ? a : b);
      EXPECT_EQ(kept.second & 0xFFFF, b > a ? 0xFFFFu : 0u);
      EXPECT_EQ(kept.second >> 16, a > b ? 0xFFFFu : 0u);
    }
  }
  const float nan = std::nanf("");
  for (const bool first : {false, true}) {
    const KeptOfPair kept = keep_one(first ? nan : 1.0f, first ? 1.0f : nan, 1.0f, 2.0f);
    EXPECT_TRUE(std::isnan(kept.row0));
    EXPECT_EQ(kept.row1, 2.0f);
  }
}

// 128 threads take every value of V from where TMA put it to where the product looks for it, once, without
// bank conflicts.
TEST(PairMap, TransposesV) {
  for (const int rows : {32, 64, 96, 128, 192, 256}) {
    for (const int tile_keys : kTiles) {
      if (tile_keys / 16 * (rows / 32) % 4 != 0) continue;  // four warps share it evenly in every kernel
      std::map<int, std::pair<Slot, int>> raw;              // key and column of V by offset
      for (int row = 0; row < tile_keys; ++row) {
        for (int column = 0; column < rows; ++column) {
          const int panel = column / 32 * tile_keys * 128;
          raw[panel + swizzled_offset(row, column % 32 / 4) + column % 4 * 4] = {pair_of_k_row(row, tile_keys), column};
        }
      }
      std::map<int, std::pair<Slot, int>> written;
      for (int unit = 0; unit < tile_keys / 16 * (rows / 32) / 4; ++unit) {
        for (int i = 0; i < 4; ++i) {
          for (int first = 0; first < 128; first += 8) {  // eight lanes move 16 bytes each at once
            std::set<int> banks_read, banks_written;
            for (int thread = first; thread < first + 8; ++thread) {
              const TransposeShare share = transpose_share(thread, tile_keys);
              const int panels = panel_step(tile_keys) * unit;
              const auto from = [&](int x) {
                return raw_offset(share.chunk, x, share.row, tile_keys) + panels * tile_keys * 128;
              };
              const int to = rows_further(transposed_offset(share.row + 32 * panels, share.chunk, rows), i);
              banks_read.insert(from(i) % 128);
              banks_written.insert(to % 128);
              for (int x = 0; x < 4; ++x) {
                EXPECT_TRUE(written.try_emplace(to + 4 * x, raw.at(from(x) + 4 * i)).second);
              }
            }
            EXPECT_EQ(banks_read.size(), 8u);
            EXPECT_EQ(banks_written.size(), 8u);
          }
        }
      }
      EXPECT_EQ(written.size(), static_cast<std::size_t>(rows * tile_keys));
      for (int row = 0; row < rows; ++row) {
        for (int column = 0; column < tile_keys; ++column) {
          const auto& [slot, value] = written.at(transposed_offset(row, column / 4, rows) + column % 4 * 4);
          EXPECT_EQ(slot.group, pair_of_v_column(column).group);
          EXPECT_EQ(slot.element, pair_of_v_column(column).element);
          EXPECT_EQ(value, row);
        }
      }
    }
  }
}

// A thread tells its four keys apart by their distance from the first.
TEST(PairMap, KeysOfAChunkLieAtFixedDistances) {
  for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
    for (const int tile_keys : kTiles) {
      const KeyMap map = pair_map(grouping, tile_keys);
      for (int column = 0; column < tile_keys; ++column) {
        const Slot slot = pair_of_v_column(column);
        const int first = map.key(1, pair_of_v_column(column / 4 * 4).group, 0);
        EXPECT_EQ(map.key(1, slot.group, slot.element), first + key_distance(map, column % 4));
      }
    }
  }
}

TEST(RoundTf32, ToNearestEven) {
  const auto rounded = [](float x) { return std::bit_cast<float>(ptx::round_tf32(x)); };
  EXPECT_EQ(rounded(1.0f), 1.0f);
  EXPECT_EQ(rounded(1.0f + 0x1p-11f), 1.0f);  // ties
  EXPECT_EQ(rounded(-1.0f - 0x1p-11f), -1.0f);
  EXPECT_EQ(rounded(1.0f + 0x1.8p-10f), 1.0f + 0x1p-9f);
  EXPECT_EQ(rounded(1.0f + 0x1.FFCp-12f), 1.0f);
  EXPECT_EQ(rounded(1.0f + 0x1.002p-11f), 1.0f + 0x1p-10f);
  EXPECT_TRUE(std::isinf(rounded(std::numeric_limits<float>::infinity())));
  EXPECT_TRUE(std::isinf(rounded(std::numeric_limits<float>::max())));
  EXPECT_TRUE(std::isnan(rounded(std::nanf(""))));
}

}  // namespace
}  // namespace dspattn::cuda::tile
