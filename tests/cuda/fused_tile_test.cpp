// Layout, selection and metadata of the fused kernel, on the host: the same functions the kernel is built from.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include "core/half.h"
#include "cuda/packed_halves.h"
#include "cuda/tile/kept_elements.h"
#include "cuda/tile/key_map.h"
#include "cuda/tile/mask_map.h"
#include "cuda/tile/select.h"

namespace dspattn::cuda::tile {
namespace {

TEST(KeyMap, GroupsAreThoseOfTheContract) {
  for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}}) {
    for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
      for (const int tile_keys : {128, 64, 32}) {
        const KeyMap map = key_map(pattern, grouping, tile_keys);
        std::set<int> seen;
        for (int part = 0; part < kBlockKeys / tile_keys; ++part) {
          for (int group = 0; group < tile_keys / 4; ++group) {
            for (int element = 0; element < 4; ++element) {
              const int key = map.key(part, group, element);
              EXPECT_TRUE(seen.insert(key).second);
              // Elements of a hardware group belong to one group of the pattern, in ascending order (1:2: two groups).
              const int lead = element - element % pattern.group;
              const KeyPlace place = place_of_key(key, pattern.group, grouping);
              EXPECT_EQ(place.group, place_of_key(map.key(part, group, lead), pattern.group, grouping).group);
              EXPECT_EQ(place.element, element % pattern.group);
            }
          }
        }
        EXPECT_EQ(seen.size(), static_cast<std::size_t>(kBlockKeys));
        EXPECT_EQ(*seen.rbegin(), kBlockKeys - 1);
      }
    }
  }
}

TEST(KeyMap, OneLaneHoldsAWholeGroup) {
  for (const int tile_keys : {128, 64, 32}) {
    for (int t = 0; t < 4; ++t) {
      for (int m = 0; m < tile_keys / 16; ++m) {
        for (int element = 0; element < 4; ++element) {
          const int index = 4 * m + (element & 1) + (element >> 1) * (tile_keys / 4);
          const Slot slot = slot_of_k_row(accumulator_column(index, t), tile_keys);
          EXPECT_EQ(slot.group, 4 * m + t);
          EXPECT_EQ(slot.element, element);
        }
      }
    }
    for (int row = 0; row < tile_keys; ++row) {
      EXPECT_EQ(slot_of_v_row(row).group, row / 4);
      EXPECT_EQ(slot_of_v_row(row).element, row % 4);
    }
  }
}

TEST(KeyMap, SwizzleSpreadsEqualChunksOverBanks) {
  for (int chunk = 0; chunk < 8; ++chunk) {
    std::set<int> banks;
    for (int row = 0; row < 8; ++row) banks.insert(swizzled_offset(row, chunk) % 128);
    EXPECT_EQ(banks.size(), 8u);
  }
}

// Every byte of a block of a mask has a place of its own, and rows of a panel spread over the banks.
TEST(MaskMap, ElementsDoNotOverlap) {
  for (const int bytes : {1, 2, 4}) {
    std::set<int> seen;
    for (int row = 0; row < kMaskRows; ++row) {
      for (int key = 0; key < kBlockKeys; ++key) {
        const int offset = mask_offset(row, key, bytes);
        EXPECT_EQ(offset % bytes, 0);
        EXPECT_LT(offset, mask_block_bytes(bytes));
        EXPECT_TRUE(seen.insert(offset).second);
      }
    }
  }
}

// A lane gets from its first key to all its others, in runs of neighbours, in every pattern, grouping and tile size.
void expect_lanes_find_keys(const KeyMap& keys, int tile_keys, int bytes) {
  const int runs = 4 / mask_run(keys);
  for (const std::uint32_t block : {0u, 5 * 1024u}) {
    const auto place = [&](int row, int key) {
      return block + static_cast<std::uint32_t>(mask_offset(row, key, bytes));
    };
    for (int row = 0; row < kMaskRows; ++row) {
      for (int t = 0; t < 4; ++t) {
        for (int part = 0; part < kBlockKeys / tile_keys; ++part) {
          const std::uint32_t first = mask_moved(place(row, t * keys.group_step), part * keys.part_step, bytes);
          for (int m = 0; m < tile_keys / 16; ++m) {
            std::set<int> elements;
            for (int run = 0; run < runs; ++run) {
              const std::uint32_t at = mask_moved(first, keys.key(0, 4 * m, run), bytes);
              EXPECT_EQ(at % static_cast<std::uint32_t>(bytes * mask_run(keys)), 0u);  // one load
              for (int i = 0; i < mask_run(keys); ++i) {
                const int element = mask_element(keys, run, i);
                EXPECT_TRUE(elements.insert(element).second);
                EXPECT_EQ(at + static_cast<std::uint32_t>(i * bytes), place(row, keys.key(part, 4 * m + t, element)));
              }
            }
            EXPECT_EQ(elements.size(), 4u);
          }
        }
      }
    }
  }
}

TEST(MaskMap, LanesFindTheirKeys) {
  for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}}) {
    for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
      for (const int tile_keys : {128, 64}) {
        for (const int bytes : {1, 2, 4}) {
          expect_lanes_find_keys(key_map(pattern, grouping, tile_keys), tile_keys, bytes);
        }
      }
    }
  }
}

// Which of four are kept, by sorting: larger first, ties to the lower index.
std::array<int, 2> expected(const std::array<float, 4>& scores, bool pairs) {
  if (pairs) return {scores[1] > scores[0] ? 1 : 0, scores[3] > scores[2] ? 3 : 2};
  std::array<int, 4> order{0, 1, 2, 3};
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  return {std::min(order[0], order[1]), std::max(order[0], order[1])};
}

TEST(Select, KeepsAndEncodesTheLargestOfEveryOrderWithTies) {
  const float kInf = std::numeric_limits<float>::infinity();
  const std::array<float, 4> values{-kInf, -1.5f, 0.0f, 2.0f};
  for (const bool pairs : {false, true}) {
    for (int code = 0; code < 256 * 256; code += 7) {  // row g from the low byte, row g + 8 from the high one
      std::array<std::array<float, 4>, 2> rows;
      for (std::size_t i = 0; i < 4; ++i) {
        rows[0][i] = values[static_cast<std::size_t>(code >> (2 * i)) & 3];
        rows[1][i] = values[static_cast<std::size_t>(code >> (8 + 2 * i)) & 3];
      }
      const auto word = [&](std::size_t i) { return packed(rows[0][i], rows[1][i]); };
      const Kept kept = pairs ? keep_one_of_two(word(0), word(1), word(2), word(3))
                              : keep_two_of_four(word(0), word(1), word(2), word(3));
      const Kept four[4] = {kept, kept, kept, kept};
      const KeptPair first = pair_kept<0>(four[0], four[1]);
      const KeptPair second = pair_kept<2>(four[2], four[3]);
      const std::uint32_t metadata = pairs ? metadata_one_of_two(first, second) : metadata_two_of_four(first, second);
      for (std::size_t row = 0; row < 2; ++row) {
        const std::array<int, 2> want = expected(rows[row], pairs);
        for (int group = 0; group < 4; ++group) {
          const std::uint32_t nibble = metadata >> (16 * row + static_cast<unsigned>(4 * group)) & 15;
          EXPECT_EQ(nibble, static_cast<std::uint32_t>(want[0] | want[1] << 2)) << code;
        }
        const auto half = [&](std::uint32_t x) {
          return core::decode_f16(static_cast<std::uint16_t>(x >> (16 * row)));
        };
        EXPECT_EQ(half(kept.first), rows[row][static_cast<std::size_t>(want[0])]);
        EXPECT_EQ(half(kept.second), rows[row][static_cast<std::size_t>(want[1])]);
        const KeptElements elements = kept_elements(kept);
        for (int e = 0; e < 4; ++e) {
          EXPECT_EQ(elements.mask[e] >> (16 * row) & 0xFFFFu, e == want[0] || e == want[1] ? 0xFFFFu : 0u) << code;
        }
      }
    }
  }
}

TEST(Select, OneOfFourIsTheFirstOfTheLargest) {
  constexpr float kValues[4] = {-1, 0, 0.5f, 2};
  for (unsigned code = 0; code < 256; ++code) {
    std::array<float, 4> row;
    for (unsigned i = 0; i < 4; ++i) row[i] = kValues[code >> (2 * i) & 3];
    const auto word = [&](std::size_t i) { return packed(row[i], row[3 - i]); };  // the other row is its mirror image
    const KeptElements kept = keep_one_of_four(word(0), word(1), word(2), word(3));
    const auto first = std::max_element(row.begin(), row.end()) - row.begin();
    const auto last = std::max_element(row.rbegin(), row.rend()) - row.rbegin();
    for (int e = 0; e < 4; ++e) {
      EXPECT_EQ(kept.mask[e] & 0xFFFFu, e == first ? 0xFFFFu : 0u) << code;
      EXPECT_EQ(kept.mask[e] >> 16, e == last ? 0xFFFFu : 0u) << code;
    }
  }
}

TEST(Select, NanReachesAKeptValueOfItsRowOnly) {
  for (const bool pairs : {false, true}) {
    for (std::size_t at = 0; at < 4; ++at) {
      std::array<std::uint32_t, 4> words{packed(1, 1), packed(2, 2), packed(3, 3), packed(4, 4)};
      words[at] = packed(std::nanf(""), 5);
      const Kept kept = pairs ? keep_one_of_two(words[0], words[1], words[2], words[3])
                              : keep_two_of_four(words[0], words[1], words[2], words[3]);
      const auto nan_in = [&](int shift) {
        return std::isnan(core::decode_f16(static_cast<std::uint16_t>(kept.first >> shift))) ||
               std::isnan(core::decode_f16(static_cast<std::uint16_t>(kept.second >> shift)));
      };
      EXPECT_TRUE(nan_in(0)) << at;
      EXPECT_FALSE(nan_in(16)) << at;
    }
  }
}

TEST(Select, QuadTransposeGivesLaneIItsGroups) {
  std::mt19937 random(1);
  std::array<std::uint32_t, 4> words;
  for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random());
  std::array<std::uint32_t, 4> exchanged;
  for (std::size_t t = 0; t < 4; ++t) {
    exchanged[t] = QuadTranspose::of_lane(static_cast<int>(t)).exchange_pairs(words[t], words[t ^ 1]);
  }
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint32_t result =
        QuadTranspose::of_lane(static_cast<int>(i)).exchange_halves(exchanged[i], exchanged[i ^ 2]);
    for (unsigned half = 0; half < 2; ++half) {
      for (unsigned t = 0; t < 4; ++t) {  // nibble t of lane i is nibble i of lane t
        EXPECT_EQ(result >> (16 * half + 4 * t) & 15, words[t] >> (16 * half + 4 * i) & 15) << i << t;
      }
    }
  }
}

}  // namespace
}  // namespace dspattn::cuda::tile
