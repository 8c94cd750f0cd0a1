// Few query rows: the order of packed rows, the cuts through a range of tiles, scalar selection and its codes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "cuda/tile/few_rows.h"

namespace dspattn::cuda::tile {
namespace {

TEST(FewRows, RowsOfAHeadFollowEachOther) {
  EXPECT_EQ(packed_row(0, 3).head, 0);
  EXPECT_EQ(packed_row(2, 3).query, 2);
  EXPECT_EQ(packed_row(3, 3).head, 1);
  EXPECT_EQ(packed_row(3, 3).query, 0);
}

TEST(FewRows, PartsCoverARangeOnceAndEvenly) {
  for (const int count : {0, 1, 5, 64, 1000}) {
    for (const int splits : {1, 2, 7, 64}) {
      int at = 3, least = count, most = 0;
      for (int split = 0; split < splits; ++split) {
        const TileRange part = part_of_range({3, 3 + count}, split, Divisor(splits));
        EXPECT_EQ(part.begin, at);
        at = part.end;
        least = std::min(least, part.end - part.begin);
        most = std::max(most, part.end - part.begin);
      }
      EXPECT_EQ(at, 3 + count);
      EXPECT_LE(most - least, 1);
    }
  }
  const TileRange far = part_of_range({0, 1 << 24}, 1023, Divisor(1024));
  EXPECT_EQ(far.end, 1 << 24) << "no overflow";
}

// Every order and every tie of four small numbers, -inf among them, beside a plain count of who beats whom.
TEST(FewRows, SelectionIsThatOfTheContract) {
  const float values[] = {-std::numeric_limits<float>::infinity(), 0, 1, 2};
  for (int code = 0; code < 256; ++code) {
    std::array<float, 4> x{};
    for (int e = 0; e < 4; ++e) x[static_cast<std::size_t>(e)] = values[code >> (2 * e) & 3];
    const auto kept_by_rank = [&](int first, int count, int keep) {
      std::vector<int> kept;
      for (int i = first; i < first + count; ++i) {
        int better = 0;
        for (int j = first; j < first + count; ++j) {
          const float a = x[static_cast<std::size_t>(i)], b = x[static_cast<std::size_t>(j)];
          if (b > a || (b == a && j < i)) ++better;
        }
        if (better < keep) kept.push_back(i);
      }
      return kept;
    };
    const KeptOfFour two = two_of_four(x[0], x[1], x[2], x[3]);
    EXPECT_EQ((std::vector<int>{two.first, two.second}), kept_by_rank(0, 4, 2)) << code;
    const KeptOfFour pairs = one_of_each_two(x[0], x[1], x[2], x[3]);
    EXPECT_EQ((std::vector<int>{pairs.first}), kept_by_rank(0, 2, 1)) << code;
    EXPECT_EQ((std::vector<int>{pairs.second}), kept_by_rank(2, 2, 1)) << code;
  }
}

TEST(FewRows, ANanLeavesTwoDistinctKeys) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int code = 0; code < 81; ++code) {
    std::array<float, 4> x{};
    for (int e = 0, rest = code; e < 4; ++e, rest /= 3)
      x[static_cast<std::size_t>(e)] = rest % 3 == 0 ? nan : static_cast<float>(rest % 3);
    const KeptOfFour two = two_of_four(x[0], x[1], x[2], x[3]);
    EXPECT_LT(two.first, two.second);
    const KeptOfFour pairs = one_of_each_two(x[0], x[1], x[2], x[3]);
    EXPECT_LT(pairs.first, pairs.second);
  }
}

TEST(FewRows, CodesHoldElementsAndWhatIsHidden) {
  for (int first = 0; first < 3; ++first) {
    for (int second = first + 1; second < 4; ++second) {
      for (int hidden = 0; hidden < 4; ++hidden) {
        const std::uint32_t code = kept_code({first, second}, (hidden & 1) != 0, (hidden & 2) != 0);
        EXPECT_EQ(kept_element(code, 0), first);
        EXPECT_EQ(kept_element(code, 1), second);
        EXPECT_EQ(kept_is_hidden(code, 0), (hidden & 1) != 0);
        EXPECT_EQ(kept_is_hidden(code, 1), (hidden & 2) != 0);
        EXPECT_LT(code, 256u);
      }
    }
  }
}

TEST(FewRows, MetadataIsANibbleAGroup) {
  EXPECT_EQ(metadata_of_codes(0x3E2D1C04u), 0xEDC4u);
  EXPECT_EQ(metadata_of_codes(0x04040404u), 0x4444u);
}

TEST(FewRows, ALaneHasAGroupInTwoAccumulators) {
  for (int t = 0; t < 4; ++t) {
    for (const int i : {0, 1}) {
      const int which = t < 2 ? 0 : 1;  // the accumulator with elements 0 and 1
      EXPECT_EQ(row_of_column(which, 2 * t + i), 4 * t + i);
      EXPECT_EQ(row_of_column(1 - which, 2 * t + i), 4 * t + 2 + i);
    }
  }
  for (const int which : {0, 1}) {
    unsigned banks = 0;  // of 16 bytes, of a chunk in the swizzle
    for (int column = 0; column < 8; ++column)
      banks |= 1u << (swizzled_offset(row_of_column(which, column), 3) / 16 % 8);
    EXPECT_EQ(banks, 0xFFu);
  }
}

TEST(FewRows, ChosenOfFourAreThoseThatAreKept) {
  for (int case_index = 0; case_index < 256; ++case_index) {  // all of four numbers in 0 ... 3, ties among them
    float x[4];
    for (int e = 0; e < 4; ++e) x[e] = static_cast<float>(case_index >> (2 * e) & 3);
    const int elements[4] = {0, 1, 2, 3};
    for (const bool pairs : {false, true}) {
      const KeptOfFour kept = pairs ? one_of_each_two(x[0], x[1], x[2], x[3]) : two_of_four(x[0], x[1], x[2], x[3]);
      const ChosenOfFour chosen = choose_of_four(x, pairs);
      EXPECT_EQ(chosen.first(elements), kept.first);
      EXPECT_EQ(chosen.second(elements), kept.second);
      EXPECT_EQ(chosen.code(), kept_code(kept, false, false));
      EXPECT_EQ(chosen.left_out(x), x[0] + x[1] + x[2] + x[3] - x[kept.first] - x[kept.second]);
    }
  }
}

}  // namespace
}  // namespace dspattn::cuda::tile
