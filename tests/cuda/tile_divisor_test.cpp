// Division by multiplication: exact over its whole range.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "cuda/tile/divisor.h"

namespace dspattn::cuda::tile {
namespace {

constexpr int kLargest = std::numeric_limits<int>::max();

// Small numbers, and those around the powers of two and their multiples of three.
std::vector<int> numbers(int least) {
  std::vector<int> all;
  for (int n = least; n < 300; ++n) all.push_back(n);
  for (int bits = 8; bits < 31; ++bits) {
    for (const std::int64_t near : {std::int64_t{1} << bits, std::int64_t{3} << (bits - 1)}) {
      for (std::int64_t n = near - 2; n <= near + 2; ++n)
        all.push_back(static_cast<int>(std::min<std::int64_t>(n, kLargest)));
    }
  }
  for (int below = 0; below < 5; ++below) all.push_back(kLargest - below);
  return all;
}

TEST(TileDivisor, DividesAsThePlainDivisionDoes) {
  const std::vector<int> dividends = numbers(0);
  for (const int by : numbers(1)) {
    const Divisor divisor(by);
    const auto expect = [&](int n) {
      ASSERT_EQ(divisor.quotient(n), n / by) << n << " / " << by;
      ASSERT_EQ(divisor.remainder(n), n % by) << n << " % " << by;
    };
    for (const int n : dividends) expect(n);
    // Where quotients change: a multiplier that is off by little errs there first, and most at the largest.
    for (const int multiple : {1, 2, 7, kLargest / by / 2, kLargest / by}) {
      const std::int64_t edge = std::int64_t{by} * multiple;
      for (std::int64_t n = std::max<std::int64_t>(edge - 1, 0); n <= edge + 1 && n <= kLargest; ++n) {
        expect(static_cast<int>(n));
      }
    }
  }
}

TEST(TileDivisor, IsOneWhenNothingIsSaid) {
  EXPECT_EQ(Divisor().quotient(kLargest), kLargest);
  EXPECT_EQ(Divisor().remainder(kLargest), 0);
}

}  // namespace
}  // namespace dspattn::cuda::tile
