// Scores with keys as rows: which key a row is, that a group's two lanes choose together what one lane would, and which
// queries see a key.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "cuda/tile/coarse_rows.h"
#include "cuda/tile/finite.h"
#include "cuda/tile/kept_elements.h"
#include "cuda/tile/key_row_masks.h"
#include "cuda/tile/key_rows.h"

namespace dspattn::cuda::tile {
namespace {

TEST(KeyRows, TwoLanesHoldAGroup) {
  std::set<std::pair<int, int>> slots;
  for (int warp = 0; warp < 4; ++warp) {
    for (int lane = 0; lane < 32; lane += 4) {
      const int row = 16 * warp + lane / 4;
      const Slot first = slot_of_key_row(row), second = slot_of_key_row(row + 8);
      const Slot beside = slot_of_key_row(16 * warp + (lane ^ kLanesApart) / 4);
      EXPECT_EQ(first.element, (lane & kLanesApart) != 0 ? 2 : 0);
      EXPECT_EQ(second.element, first.element + 1);
      EXPECT_EQ(second.group, first.group);
      EXPECT_EQ(beside.group, first.group);
      slots.insert({first.group, first.element});
      slots.insert({second.group, second.element});
    }
  }
  EXPECT_EQ(slots.size(), 64u);
  EXPECT_EQ(slots.rbegin()->first, 15);
}

// Every key of a block stands at one row of its tiles, groups are the pattern's, and where they are interleaved four
// rows are four neighbouring keys: what copies of a bias rest on.
TEST(KeyRows, FourRowsAreNeighboursWhereGroupsAreInterleaved) {
  for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}}) {
    for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
      const KeyMap keys = key_row_map(pattern, grouping, 64);
      std::set<int> met;
      for (int row = 0; row < kBlockKeys; ++row) {
        const auto key_of = [&](int r) {
          const Slot slot = slot_of_key_row(r % 64);
          return keys.key(r / 64, slot.group, slot.element);
        };
        met.insert(key_of(row));
        if (grouping == Grouping::interleaved) {
          EXPECT_EQ(key_of(row), key_of(row / 4 * 4) + row % 4);
          // Rows g and g + 8 are a pair, or half of a group of four.
          if (row % 16 < 8) {
            EXPECT_EQ(key_of(row + 8), key_of(row) + kBlockKeys / pattern.group);
          }
        }
      }
      EXPECT_EQ(met.size(), static_cast<std::size_t>(kBlockKeys));
      EXPECT_TRUE(*met.begin() == 0 && *met.rbegin() == kBlockKeys - 1);
    }
  }
}

// One warp writes every run of four keys of a tile to a place of its own, in all banks twice at a time, and finds in
// eight rows of a matrix eight queries in all banks.
TEST(KeyRows, BiasesThatAreCopiedAheadLieInAllBanks) {
  std::set<int> met;
  for (int first = 0; first < kMaskTileQueries; first += kBiasRunQueries) {
    std::map<int, int> banks;
    for (int lane = 0; lane < 32; ++lane) {
      const BiasRun run = BiasRun::of(lane);
      const int query = first + run.query, at = run.offset(query);
      ASSERT_LT(run.query, kBiasRunQueries);
      EXPECT_EQ(at, bias_offset(run.warp, query, run.element & 1) + 8 * (run.element >> 1));
      EXPECT_EQ(at / 256 * 256 + (run.offset(run.query) % 256 ^ BiasRun::of(0).offset(first % 8)), at);
      met.insert(at);
      ++banks[at % 128 / 8];
    }
    EXPECT_EQ(banks.size(), 16u);
    for (const auto& [bank, times] : banks) EXPECT_EQ(times, 2) << bank;
  }
  EXPECT_EQ(met.size(), 1024u);
  EXPECT_EQ(*met.rbegin(), 4 * kBiasWarpBytes - 8);
  for (int warp = 0; warp < 4; ++warp) {
    for (int upper = 0; upper < 2; ++upper) {
      std::set<int> banks;
      for (int query = 8; query < 16; ++query) banks.insert(bias_offset(warp, query, upper) % 128 / 16);
      EXPECT_EQ(banks.size(), 8u);
    }
  }
}

// Few different scores, so that most groups have ties; signed zeros, the lowest score and infinities among them.
TEST(KeyRows, LanesChooseWhatOneLaneWould) {
  constexpr std::uint16_t kScores[] = {0x0000, 0x8000, 0x3C00, 0xBC00, 0x3C01, 0xFBFF, 0x7BFF, 0x7C00};
  std::mt19937 random(1);
  const auto draw = [&] {
    const auto one = [&] {
      return random() % 4 > 0 ? std::uint32_t{kScores[random() % 8]} : std::uint32_t(random() % 0x7C00);
    };
    const std::uint32_t low = one();
    return low | one() << 16;
  };
  for (int i = 0; i < 20000; ++i) {
    const std::uint32_t x[4] = {draw(), draw(), draw(), draw()};
    const KeptElements two = kept_elements(keep_two_of_four(x[0], x[1], x[2], x[3]));
    const KeptElements one = kept_elements(keep_one_of_two(x[0], x[1], x[2], x[3]));
    const HalfGroup half[2] = {half_group(x[0], x[1], 0), half_group(x[2], x[3], ~0u)};
    for (int lane = 0; lane < 2; ++lane) {
      const KeptHalf kept =
          keep_two_of_four(x[2 * lane], x[2 * lane + 1], half[lane], half[1 - lane], lane == 0 ? 0u : ~0u);
      ASSERT_EQ(kept.first, two.mask[2 * lane]);
      ASSERT_EQ(kept.second, two.mask[2 * lane + 1]);
      const KeptHalf pair = keep_one_of_two(x[2 * lane], x[2 * lane + 1]);
      ASSERT_EQ(pair.first, one.mask[2 * lane]);
      ASSERT_EQ(pair.second, one.mask[2 * lane + 1]);
    }
  }
}

TEST(KeyRows, QueriesSeeTheKeysTheyReach) {
  std::mt19937 random(2);
  const auto number = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  for (int i = 0; i < 3000; ++i) {
    RowBand band;
    band.left = number(0, 2) > 0 ? kMaxRows : number(-40, 200);
    band.right = number(0, 1) > 0 ? kMaxRows : number(-40, 200);
    band.diagonal = number(-150, 150);
    band.key_length = number(0, 300);
    const int key = number(0, 320), first = 64 * number(0, 4);
    const QueryInterval seen = queries_of_key(band, key, first);
    for (int row = 0; row < 64; ++row) {
      const bool visible = key >= band.begin(first + row) && key < band.end(first + row);
      ASSERT_EQ(seen.holds(row), visible) << "key " << key << ", row " << first + row;
      const std::uint32_t pair = QueryPairs::of(seen).holds(ptx::pack_f16x2(static_cast<float>(row), 0.0f));
      ASSERT_EQ(pair & 0xFFFF, visible ? 0xFFFFu : 0u) << "key " << key << ", row " << first + row;
    }
  }
}

// Weights of a row of equal scores, by an LSE that fp32 holds to 2^-7 or so, add up to 1 when they are corrected; those
// of rows with smaller scores are left alone.
TEST(CoarseRows, FewKeysAreCounted) {
  for (const float scale : {1.4427f, 1.93f, 2.88f}) {
    for (const float score : {-65408.0f, -65504.0f, -40000.0f, -32800.0f, 50016.0f}) {
      for (int keys = 1; keys < 32; ++keys) {
        const double exact = double{score} * scale / 1.4426950408889634 + std::log(keys);
        for (const float toward : {-1e9f, 0.0f, 1e9f}) {
          const auto nearest = static_cast<float>(exact);
          const float lse = toward == 0 ? nearest : std::nextafter(nearest, toward);
          const float weight = std::exp2(std::fma(score, scale, -(lse * 1.4426950408889634f)));
          ASSERT_NEAR(static_cast<float>(keys) * weight * coarse_correction(lse, scale), 1, 1e-5)
              << score << " " << keys;
        }
      }
    }
    for (const float lse : {0.0f, -20000.0f, 12345.6f, -INFINITY, NAN}) EXPECT_EQ(coarse_correction(lse, scale), 1);
  }
}

TEST(Finite, OnlyWhatIsNotFiniteChanges) {
  for (const DType type : {DType::bf16, DType::f16}) {
    const std::uint32_t infinity = exponent_bits(type);
    for (std::uint32_t x = 0; x < 0x10000; ++x) {
      const std::uint32_t size = x & 0x7FFF;
      const std::uint32_t largest = (x & 0x8000) | (infinity - 1);
      const std::uint32_t kept = size < infinity ? x : 0, tamed = size == infinity ? largest : kept;
      const std::uint32_t other = 0x3F80;
      ASSERT_EQ(finite_pair<Infinity::zero>(x << 16 | other, type), kept << 16 | other);
      ASSERT_EQ(finite_pair<Infinity::largest>(other << 16 | x, type), other << 16 | tamed);
    }
  }
}

}  // namespace
}  // namespace dspattn::cuda::tile
