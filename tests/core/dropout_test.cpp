// Which weights dropout drops: how many, which together, and what it depends on.
#include "core/dropout.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>

namespace dspattn::core {
namespace {

bool dropped(std::uint64_t seed, std::uint64_t offset, std::uint32_t batch, std::uint32_t head, std::uint32_t i,
             std::uint32_t j, double probability) {
  return DropoutRow::of(seed, offset, batch, head, i).bits(j) < dropout_threshold(probability);
}

// Of `count` weights with probability p, the number dropped has a standard deviation of sqrt(count p (1 - p)).
void expect_share(std::int64_t drops, std::int64_t count, double p, const char* what) {
  const double n = static_cast<double>(count);
  EXPECT_NEAR(static_cast<double>(drops), n * p, 5 * std::sqrt(n * p * (1 - p))) << what << ", p = " << p;
}

TEST(Dropout, DropsTheShareAskedForOverallByRowByKeyAndByBit) {
  constexpr std::uint32_t kRows = 512, kKeys = 512;
  for (const double p : {0.1, 0.5, 0.9}) {
    std::int64_t all = 0;
    std::array<std::int64_t, kKeys> by_key{};
    for (std::uint32_t i = 0; i < kRows; ++i) {
      std::int64_t by_row = 0;
      for (std::uint32_t j = 0; j < kKeys; ++j) {
        const bool drop = dropped(7, 3, 1, 2, i, j, p);
        by_row += drop;
        by_key[j] += drop;
      }
      all += by_row;
      expect_share(by_row, kKeys, p, "row");
    }
    for (const std::int64_t count : by_key) expect_share(count, kRows, p, "key");
    expect_share(all, std::int64_t{kRows} * kKeys, p, "all");
  }
  std::array<std::int64_t, 32> set{};
  for (std::uint32_t j = 0; j < 65536; ++j) {
    const std::uint32_t bits = DropoutRow::of(1, 0, 0, 0, j >> 8).bits(j & 255);
    for (std::size_t bit = 0; bit < 32; ++bit) set[bit] += bits >> bit & 1;
  }
  for (const std::int64_t count : set) expect_share(count, 65536, 0.5, "bit");
}

// Weights that lie side by side, in any direction, are dropped independently of each other.
TEST(Dropout, NeighboursAreIndependent) {
  constexpr double p = 0.3;
  constexpr std::uint32_t kRows = 256, kKeys = 256;
  constexpr std::uint32_t kAway[][4] = {{0, 0, 0, 1}, {0, 0, 0, 64}, {0, 0, 1, 0}, {0, 0, 1, 1},
                                        {0, 1, 0, 0}, {1, 0, 0, 0},  {0, 0, 2, 5}, {0, 0, 128, 0}};
  for (const auto& away : kAway) {
    std::int64_t both = 0;
    for (std::uint32_t i = 0; i < kRows; ++i) {
      for (std::uint32_t j = 0; j < kKeys; ++j) {
        both += dropped(5, 9, 0, 0, i, j, p) && dropped(5, 9, away[0], away[1], i + away[2], j + away[3], p);
      }
    }
    expect_share(both, std::int64_t{kRows} * kKeys, p * p, "both");
  }
}

TEST(Dropout, SeedAndOffsetGiveOtherDrops) {
  constexpr double p = 0.5;
  const std::uint64_t pairs[][2] = {
      {1, 0}, {2, 0}, {1, 1}, {0, 1}, {std::uint64_t{1} << 32, 0}, {1, std::uint64_t{1} << 63}};
  for (const auto& a : pairs) {
    for (const auto& b : pairs) {
      if (&a == &b) continue;
      std::int64_t same = 0;
      for (std::uint32_t i = 0; i < 64; ++i) {
        for (std::uint32_t j = 0; j < 256; ++j) {
          same += dropped(a[0], a[1], 0, 0, i, j, p) == dropped(b[0], b[1], 0, 0, i, j, p);
        }
      }
      expect_share(same, 64 * 256, 0.5, "agreement");
    }
  }
}

TEST(Dropout, ThresholdsReachBothEnds) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(0.5), 1u << 31);
  EXPECT_EQ(dropout_threshold(std::nextafter(1.0, 0.0)), 0xFFFFFFFFu);
}

}  // namespace
}  // namespace dspattn::core
