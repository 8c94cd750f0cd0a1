// What a border block hides (tile/hidden.h), against every row and key; and fp16 pairs (ptx/packed_half.h) that the
// exponentials are made of, against doubles.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "core/half.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/tile/hidden.h"
#include "cuda/tile/key_map.h"
#include "dspattn/pattern.h"

namespace {

using namespace dspattn;
using cuda::tile::Hidden;

constexpr int kRows = 64;
constexpr int kHalf = cuda::tile::kBlockKeys / 2;
constexpr int kFar = 1 << 29;  // no window

TEST(Hidden, HoldsForEveryRowAndKey) {
  int seen_of_kind[4] = {};
  for (const int left : {0, 5, 63, 64, 100, kFar}) {
    for (const int right : {-3, 0, 7, kFar}) {
      for (int position = -140; position <= 200; position += 3) {
        for (const int last : {0, 30, 62, 63, 64, 100, 127, 500}) {
          const Hidden hidden = cuda::tile::hidden_of_border(position, kRows, last, left, right);
          ++seen_of_kind[static_cast<int>(hidden)];
          if (hidden == Hidden::anything) continue;  // says nothing of any key
          // No row sees a key of the second half; or all rows see every key of the first.
          const bool wanted = hidden == Hidden::upper;
          const int first_key = wanted ? 0 : kHalf;
          for (int row = 0; row < kRows; ++row) {
            for (int key = first_key; key < first_key + kHalf; ++key) {
              const int from_diagonal = key - (position + row);
              const bool seen = from_diagonal >= -left && from_diagonal <= right && key <= last;
              if (seen != wanted) FAIL() << position << " " << row << " " << key;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(seen_of_kind[static_cast<int>(Hidden::nothing)], 0);
  for (const Hidden kind : {Hidden::lower, Hidden::upper, Hidden::anything}) {
    EXPECT_GT(seen_of_kind[static_cast<int>(kind)], 0) << static_cast<int>(kind);
  }
}

TEST(Hidden, FindsBothHalvesOnTheDiagonalAndWhereKeysEnd) {
  EXPECT_EQ(cuda::tile::hidden_of_border(0, kRows, 127, kFar, 0), Hidden::lower);
  EXPECT_EQ(cuda::tile::hidden_of_border(64, kRows, 127, kFar, 0), Hidden::upper);
  EXPECT_EQ(cuda::tile::hidden_of_border(32, kRows, 127, kFar, 0), Hidden::anything);
  EXPECT_EQ(cuda::tile::hidden_of_border(1000, kRows, 40, kFar, kFar), Hidden::lower);
  EXPECT_EQ(cuda::tile::hidden_of_border(1000, kRows, 103, kFar, kFar), Hidden::upper);
  EXPECT_EQ(cuda::tile::hidden_of_border(64, kRows, 127, 100, 0), Hidden::anything);
}

TEST(Hidden, UpperHalfIsThatOfTheKeyMap) {
  for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}}) {
    for (const int tile_keys : {64, 128}) {
      const auto keys = cuda::tile::key_map(pattern, Grouping::interleaved, tile_keys);
      for (int part = 0; part < cuda::tile::kBlockKeys / tile_keys; ++part) {
        for (int group = 0; group < tile_keys / 4; ++group) {
          for (int e = 0; e < 4; ++e) {
            EXPECT_EQ(keys.key(part, group, e) >= kHalf, cuda::tile::in_upper_half(pattern, e));
          }
        }
      }
    }
  }
}

std::uint32_t pair_of(double low, double high) {
  return core::encode_f16(low) | static_cast<std::uint32_t>(core::encode_f16(high)) << 16;
}
double low_of(std::uint32_t pair) { return core::decode_f16(static_cast<std::uint16_t>(pair & 0xFFFF)); }
double high_of(std::uint32_t pair) { return core::decode_f16(static_cast<std::uint16_t>(pair >> 16)); }

TEST(PackedHalf, MultiplyAddRoundsOnce) {
  // 1.4424 * 5.5 = 7.9332...: the product alone would be rounded to a step of 2^-8, the small difference is not.
  const double scale = low_of(pair_of(1.4426950408889634, 0));
  const std::uint32_t result = cuda::ptx::fma_f16x2(pair_of(5.5, -2), pair_of(scale, scale), pair_of(-7.9375, 3));
  EXPECT_EQ(low_of(result), low_of(pair_of(5.5 * scale - 7.9375, 0)));
  EXPECT_EQ(high_of(result), low_of(pair_of(-2 * scale + 3, 0)));
  EXPECT_NE(low_of(result), low_of(pair_of(low_of(pair_of(5.5 * scale, 0)) - 7.9375, 0)));
}

TEST(PackedHalf, ExponentialsOfBothHalves) {
  for (double x = -24; x <= 5; x += 0.37) {
    const double argument = low_of(pair_of(x, 0));
    const std::uint32_t result = cuda::ptx::exp2_f16x2(pair_of(x, -x));
    EXPECT_NEAR(low_of(result), std::exp2(argument), std::exp2(argument) * 0x1p-11 + 0x1p-25);
    if (-argument < 15.9) {
      EXPECT_NEAR(high_of(result), std::exp2(-argument), std::exp2(-argument) * 0x1p-11);
    }
  }
  EXPECT_EQ(cuda::ptx::exp2_f16x2(pair_of(-65504, 0)), pair_of(0, 1));
  EXPECT_TRUE(std::isnan(low_of(cuda::ptx::exp2_f16x2(0x0000FFFFu))));
}

}  // namespace
