#include "dspattn/pattern.h"

#include <gtest/gtest.h>

#include <set>

#include "dspattn/error.h"

namespace dspattn {
namespace {

TEST(Pattern, ParsesAndPrints) {
  EXPECT_EQ(parse_pattern("2:4"), (Pattern{2, 4}));
  EXPECT_EQ(parse_pattern("32:32"), (Pattern{32, 32}));
  EXPECT_EQ(parse_pattern("dense"), Pattern::dense());
  EXPECT_EQ(to_string(Pattern{3, 7}), "3:7");
  EXPECT_EQ(to_string(Pattern::dense()), "dense");
}

TEST(Pattern, RefusesWhatIsNotAPattern) {
  for (const char* text :
       {"3:2",           "0:4",  "-1:2", "1:33", "2",    ":",    "2:",   ":4",   "2:4x",  "",       "2 :4",
        "99999999999:4", "02:4", "2:04", "00:4", "+2:4", "2:+4", " 2:4", "2:4 ", "2:4:8", "dense ", "DENSE"}) {
    EXPECT_THROW(parse_pattern(text), Error) << text;
  }
}

TEST(Grouping, InterleavedGroupsOfTwoFourKeysAreAStrideOf32Apart) {
  for (int element = 0; element < 4; ++element) {
    EXPECT_EQ(key_at_place(0, element, 4, Grouping::interleaved), 32 * element);
    EXPECT_EQ(key_at_place(33, element, 4, Grouping::interleaved), 128 + 1 + 32 * element);
  }
}

TEST(Grouping, PlacesAndKeysAreInverseAndElementsAscend) {
  for (const Grouping grouping : {Grouping::consecutive, Grouping::interleaved}) {
    for (const int group_size : {1, 2, 4, 8, 16, 32}) {
      std::set<std::int64_t> seen;
      const std::int64_t groups = group_count(300, group_size, grouping);
      for (std::int64_t group = 0; group < groups; ++group) {
        std::int64_t previous = -1;
        for (int element = 0; element < group_size; ++element) {
          const std::int64_t key = key_at_place(group, element, group_size, grouping);
          EXPECT_GT(key, previous);
          previous = key;
          EXPECT_EQ(place_of_key(key, group_size, grouping), (KeyPlace{group, element}));
          EXPECT_TRUE(seen.insert(key).second);
        }
      }
      for (std::int64_t key = 0; key < 300; ++key) EXPECT_TRUE(seen.contains(key)) << key;
    }
  }
}

}  // namespace
}  // namespace dspattn
