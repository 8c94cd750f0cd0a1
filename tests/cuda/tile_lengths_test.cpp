// Lengths of any content and stride: what is read of them stays within the tensors.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "cuda/tile/lengths.h"

namespace dspattn::cuda::tile {
namespace {

TEST(TileLengths, SequencesStayWithinTheTensor) {
  constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::vector<std::int32_t> values{kLowest, kMost, -10, 50, 100, 100, 30, kMost, 0, kLowest};
  const LengthsView view{values.data(), 1};
  for (const int total : {0, 1, 64, 100, 1 << 30}) {
    for (int i = 0; i + 1 < static_cast<int>(values.size()); ++i) {
      const RowSpan span = packed_span(view, i, total, 77);
      EXPECT_GE(span.begin, 0);
      EXPECT_GE(span.count, 0);
      EXPECT_LE(span.count, 77);
      EXPECT_LE(span.begin, total - span.count);
    }
  }
}

TEST(TileLengths, LengthsInRangeAreTakenAsTheyAre) {
  const std::vector<std::int32_t> values{0, 9, 5, 9, 5, 9, 12, 9};
  const LengthsView every_other{values.data(), 2};
  EXPECT_EQ(packed_span(every_other, 0, 12, 12).count, 5);
  EXPECT_EQ(packed_span(every_other, 1, 12, 12).count, 0);
  EXPECT_EQ(packed_span(every_other, 2, 12, 12).begin, 5);
  EXPECT_EQ(packed_span(every_other, 2, 12, 12).count, 7);
  const LengthsView expanded{values.data() + 1, 0};
  EXPECT_EQ(packed_span(expanded, 3, 12, 12).count, 0);
  EXPECT_EQ(visible_keys(expanded, 7, 12), 9);
  EXPECT_EQ(visible_keys(expanded, 7, 8), 8);
  EXPECT_EQ(visible_keys({}, 7, 8), 8);
}

TEST(TileLengths, DecreasingIsEmpty) {
  const std::vector<std::int32_t> values{10, 4};
  const RowSpan span = packed_span({values.data(), 1}, 0, 20, 20);
  EXPECT_EQ(span.begin, 10);
  EXPECT_EQ(span.count, 0);
}

}  // namespace
}  // namespace dspattn::cuda::tile
