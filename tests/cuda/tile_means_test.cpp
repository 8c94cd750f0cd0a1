// Which mean of V a row's pruned keys bring, and where it stands in the table.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/half.h"
#include "cuda/mean_keys.h"
#include "cuda/packed_halves.h"
#include "cuda/tile/mean_windows.h"
#include "cuda/tile/means.h"
#include "cuda/tile/select.h"

namespace dspattn::cuda::tile {
namespace {

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

// What the kernels under windows compute, of every band of some sizes (tile/mean_windows.h).
void expect_of_windows(const RowBand& band, int rows, const std::string& what) {
  const MeanTable table = mean_table({band.left, band.right, 1, rows, band.key_length});
  const RowSpan last = rows_of_last_keys(band, rows);
  const int most_places = chunk_places(table, band.left, band.right);
  EXPECT_LE(most_places, kMostChunkPlaces);
  EXPECT_LE(last.count, table.by_row != 0 ? rows : kLastKeys) << what;
  std::set<int> written;  // entries of blocks
  for (int rank = 0; table.by_row == 0 && rank < block_ranks(band.key_length); ++rank) {
    const KeyBlockRange blocks = blocks_of_rank(band, rank);
    ASSERT_GE(blocks.begin, 0) << what;
    ASSERT_LE(blocks.end, band.key_length / kBlockKeys) << what;
    ASSERT_LE(blocks.begin, blocks.end) << what;
    if (rank > 0) {
      const KeyBlockRange before = blocks_of_rank(band, rank - 1);
      ASSERT_LE(blocks.begin - before.begin, 1) << what;
      ASSERT_LE(blocks.end - before.end, 1) << what;
    }
    if (blocks.end > blocks.begin) written.insert(table.entry_of_blocks({}, blocks));
  }
  for (int row = 0; row < rows; ++row) {
    const KeyInterval keys = interval_of(band, row);
    if (keys.end <= keys.begin) continue;
    const KeyBlockRange whole = whole_blocks(keys);
    if (table.by_row == 0) {
      const bool is_last = row >= last.begin && row < last.begin + last.count;
      EXPECT_EQ(is_last, has_own_entry(table, keys)) << what << ", row " << row;
      if (whole.end > whole.begin) {
        const KeyBlockRange of_rank = blocks_of_rank(band, whole.begin + whole.end - 1);
        EXPECT_EQ(of_rank.begin, whole.begin) << what << ", row " << row;
        EXPECT_TRUE(written.count(table.entry_of_blocks({}, whole))) << what << ", row " << row;
      }
    } else if (whole.end > whole.begin) {
      EXPECT_EQ(whole.end, whole.begin + 1) << what << ", row " << row;
      const int first = first_row_with(band, whole.begin);
      ASSERT_LE(first, row) << what;
      EXPECT_EQ(whole_blocks(interval_of(band, first)).begin, whole.begin) << what << ", row " << row;
      EXPECT_LE(interval_of(band, first).begin, whole.begin * kBlockKeys) << what << ", row " << row;
    }
  }
  // A chunk's rows see its keys alone, and there is room for them.
  const RowSpan own = table.by_row != 0 ? RowSpan{0, rows} : last;
  for (int begin = own.begin; begin < own.begin + own.count; begin += kRowsOfChunk) {
    const int end = std::min(begin + kRowsOfChunk, own.begin + own.count);
    const ChunkKeys chunk = chunk_keys(band, begin, end);
    EXPECT_LE(chunk.keys.end - chunk.first_place(), most_places) << what;
    for (int row = begin; row < end; ++row) {
      const KeyInterval keys = interval_of(band, row);
      if (keys.end <= keys.begin) continue;
      EXPECT_GE(keys.begin, chunk.keys.begin) << what << ", row " << row;
      EXPECT_LE(keys.end, chunk.keys.end) << what << ", row " << row;
    }
  }
}

TEST(TileMeans, Windows) {
  for (const int n_k : {1, 77, 127, 128, 129, 300, 640, 1000}) {
    for (const int n_q : {1, 100, 700}) {
      for (const int width : {-3, 1, 2, 60, 101, 127, 128, 129, 200, 253, 254, 255, 256, 257, 300, 384, 700, 1024}) {
        for (const int right : {-150, 0, 1, 64, 254, 1100}) {
          for (const int offset : {0, n_k - n_q, 37, -300}) {
            expect_of_windows({width - right - 1, right, offset, n_k}, n_q,
                              std::to_string(n_q) + " rows, " + std::to_string(n_k) + " keys, window of " +
                                  std::to_string(width) + ", right " + std::to_string(right) + ", offset " +
                                  std::to_string(offset));
            if (HasFailure()) return;
          }
        }
      }
    }
  }
  expect_of_windows({300, kMaxRows, 0, 700}, 700, "no bound on the right");
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

}  // namespace
}  // namespace dspattn::cuda::tile
