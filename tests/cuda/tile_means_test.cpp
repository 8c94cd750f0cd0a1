// Which mean of V a row's pruned keys bring, and where it stands in the table.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/half.h"
#include "cuda/packed_halves.h"
#include "cuda/tile/means.h"
#include "cuda/tile/select.h"

namespace dspattn::cuda::tile {
namespace {

using Keys = std::pair<int, int>;  // [first, second)

// By the contract: the whole blocks in the interval, or the interval.
Keys mean_of(const RowBand& band, int row) {
  const KeyInterval keys = interval_of(band, row);
  int first = -1, last = -1;
  for (int begin = 0; begin + kBlockKeys <= keys.end; begin += kBlockKeys) {
    if (begin < keys.begin) continue;
    if (first < 0) first = begin;
    last = begin + kBlockKeys;
  }
  return first < 0 ? Keys{keys.begin, keys.end} : Keys{first, last};
}

struct Sequence {
  MeanTable::Sequence place;
  RowBand band;
  int rows;
};

// Every row that sees a key has an entry within the table, and no two means share one.
void expect_entries(const MeanQuestion& question, const std::vector<Sequence>& sequences, const std::string& what) {
  const MeanTable table = mean_table(question);
  std::map<int, std::pair<int, Keys>> means;  // by entry: sequence and keys
  for (const Sequence& sequence : sequences) {
    for (int row = 0; row < sequence.rows; ++row) {
      const KeyInterval keys = interval_of(sequence.band, row);
      if (keys.end <= keys.begin) continue;
      const int entry = table.entry(sequence.place, sequence.band, row);
      ASSERT_GE(entry, 0) << what << ", row " << row;
      ASSERT_LT(entry, table.entries) << what << ", row " << row;
      const std::pair<int, Keys> mean{sequence.place.index, mean_of(sequence.band, row)};
      const auto [at, is_new] = means.insert({entry, mean});
      EXPECT_EQ(at->second, mean) << what << ", row " << row;
    }
  }
}

TEST(TileMeans, EveryRowOfABatchHasItsEntry) {
  for (const int n_k : {1, 77, 127, 128, 129, 300, 640}) {
    for (const int n_q : {1, 100, 500}) {
      for (const int left : {0, 1, 60, 126, 127, 128, 200, 253, 254, 300, kMaxRows}) {
        for (const int right : {0, 1, 64, 127, 128, 254, kMaxRows}) {
          for (const int offset : {0, n_k - n_q, 37}) {
            std::vector<Sequence> sequences;
            for (const int length : {n_k, n_k / 2, 0}) {
              const int index = static_cast<int>(sequences.size());
              sequences.push_back({{index, 0, 0}, {left, right, offset, length}, n_q});
            }
            const MeanQuestion question{left, right, 3, n_q, n_k, false, false, false, n_q, n_k};
            const std::string what = std::to_string(n_q) + " rows, " + std::to_string(n_k) + " keys, window " +
                                     std::to_string(left) + " " + std::to_string(right) + ", offset " +
                                     std::to_string(offset);
            expect_entries(question, sequences, what);
          }
        }
      }
    }
  }
}

TEST(TileMeans, PackedSequencesShareNoEntry) {
  const int cumulative[] = {0, 70, 71, 400, 400, 527, 1000, 1129};
  for (const int left : {kMaxRows, 400, 200}) {
    for (const int right : {kMaxRows, 0}) {
      std::vector<Sequence> sequences;
      for (int i = 0; i + 1 < 8; ++i) {
        const int keys = cumulative[i + 1] - cumulative[i];
        sequences.push_back({{i, cumulative[i], cumulative[i]}, {left, right, 0, keys}, keys});
      }
      expect_entries({left, right, 7, 473, 473, true, false, false, 1129, 1129}, sequences,
                     "window " + std::to_string(left) + " " + std::to_string(right));
    }
  }
}

// The table is small where rows share means: docs/rest.md.
TEST(TileMeans, EntriesOfATable) {
  const auto entries = [](int left, int right, bool masked = false) {
    return mean_table({left, right, 2, 1024, 1024, false, masked, true, 1024, 1024}).entries;
  };
  EXPECT_EQ(entries(kMaxRows, kMaxRows), 2 * 8);
  EXPECT_EQ(entries(kMaxRows, 0), 2 * (8 + 127));
  EXPECT_EQ(entries(255, 0), 2 * (2 * 8 + 127 + 254));
  EXPECT_EQ(entries(253, 0), 2 * (2 * 8 + 1024));  // no whole block in 254 keys
  EXPECT_EQ(entries(kMaxRows, 0, true), 2 * 1024);
  EXPECT_EQ(mean_table({.sequences = 2, .n_q = 8, .n_k = 64}).entries, 2 * 127);
}

TEST(TileMeans, BytesOfAWorkspace) {
  const MeanTable table = mean_table({.sequences = 2, .n_q = 1024, .n_k = 1024});
  const MeansBytes bytes = means_bytes(table, 3, 64);
  EXPECT_EQ(bytes.sums, 3u * 16 * 64 * 4);
  EXPECT_EQ(bytes.counts, 2 * bytes.sums);
  EXPECT_EQ(bytes.total, bytes.counts + 3 * 16 * 4);
}

float low_of(std::uint32_t x) { return core::decode_f16(static_cast<std::uint16_t>(x)); }
float high_of(std::uint32_t x) { return core::decode_f16(static_cast<std::uint16_t>(x >> 16)); }

// What is left out and what is kept are together all four.
TEST(LeftOut, IsWhatIsNotKept) {
  for (int code = 0; code < 256; ++code) {
    const auto value = [&](int i) { return static_cast<float>(code >> (2 * i) & 3); };
    std::uint32_t words[4];
    for (int i = 0; i < 4; ++i) words[i] = packed(value(i), -value(3 - i));
    for (const bool pairs : {false, true}) {
      const Kept kept = pairs ? keep_one_of_two(words[0], words[1], words[2], words[3])
                              : keep_two_of_four(words[0], words[1], words[2], words[3]);
      const LeftOut others = pairs ? left_out_of_two(words[0], words[1], words[2], words[3])
                                   : left_out_of_four(words[0], words[1], words[2], words[3]);
      const auto expect_all = [&](float (*half)(std::uint32_t)) {
        std::multiset<float> all, given;
        for (const std::uint32_t word : words) all.insert(half(word));
        for (const std::uint32_t word : {kept.first, kept.second, others.first, others.second})
          given.insert(half(word));
        EXPECT_EQ(given, all) << code << (pairs ? " of pairs" : " of four");
      };
      expect_all(low_of);
      expect_all(high_of);
    }
  }
}

// Tasks of a table that a kernel writes itself: each once, those of a head together, sums of no two at one place.
TEST(TileMeans, TasksOfATable) {
  for (const int right : {0, kMaxRows}) {
    for (const int columns : {64, 128}) {
      const MeanTable table = mean_table({.right = right, .sequences = 3, .n_q = 700, .n_k = 640});
      const MeanTasks tasks = mean_tasks(table, 3, 5, columns);
      const int panels = columns / kTaskColumns, kinds = kKeyShares + (right == 0 ? 1 : 0);
      ASSERT_EQ(tasks.count, 3 * 5 * panels * kinds);
      EXPECT_EQ(tasks.kept_blocks(), right == 0 ? 5 : 1);
      std::set<std::vector<int>> seen;
      std::set<std::int64_t> places;
      for (int index = 0; index < tasks.count; ++index) {
        const MeanTask task = tasks.at(index);
        EXPECT_EQ(tasks.group(task.sequence, task.head), index / (panels * kinds));
        EXPECT_TRUE(seen.insert({task.sequence, task.head, task.panel, task.share}).second);
        EXPECT_TRUE(task.sequence < 3 && task.head < 5 && task.panel < panels && task.share < kKeyShares);
        EXPECT_GE(task.share, right == 0 ? -1 : 0);
        places.insert(tasks.sums_of(tasks.group(task.sequence, task.head), task.panel));
      }
      const std::int64_t each = std::int64_t{tasks.kept_blocks()} * kKeyShares * kTaskColumns;
      EXPECT_EQ(places.size(), static_cast<std::size_t>(3 * 5 * panels));
      EXPECT_EQ(*places.rbegin(), each * (3 * 5 * panels - 1));
      EXPECT_EQ(tasks.sums_of(3 * 5, 0), each * 3 * 5 * panels);
    }
  }
}

}  // namespace
}  // namespace dspattn::cuda::tile
