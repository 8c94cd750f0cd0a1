// The pipeline kernels' layout logic, on the host: every map of tile_maps.h and the walk over blocks.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "core/metadata.h"
#include "cuda/pipeline/common/qk_split.h"
#include "cuda/pipeline/common/tile_maps.h"
#include "cuda/pipeline/common/walk.h"
#include "cuda/pipeline/sm90/common.h"

namespace dspattn::cuda::pipeline {
namespace {

TEST(Sm80Maps, PlacesOfABlockAreTheContractsPlaces) {
  for (const int group_log2 : {1, 2}) {
    const int group = 1 << group_log2;
    for (int place = 0; place < kInterleaveBlock; ++place) {
      EXPECT_EQ(key_in_block(place, group_log2, true),
                key_at_place(place / group, place % group, group, Grouping::interleaved));
      EXPECT_EQ(key_in_block(place, group_log2, false),
                key_at_place(place / group, place % group, group, Grouping::consecutive));
    }
  }
}

// Lane t's accumulators, block by block, are consecutive places: whole groups, 16 bytes of nonzeros, one metadata
// block.
TEST(Sm80Maps, EachLaneOwnsARunOfPlaces) {
  for (const int element_bytes : {2, 4}) {
    const int tile = tile_places(element_bytes);
    std::set<int> seen;
    for (int t = 0; t < 4; ++t) {
      int expected = t * tile / 4;
      for (int block = 0; block < tile / 8; ++block) {
        for (int i = 0; i < 2; ++i) {
          const int place = place_of_column(8 * block + 2 * t + i, element_bytes);
          EXPECT_EQ(place, expected++);
          seen.insert(place);
        }
      }
      EXPECT_EQ((expected - t * tile / 4) / 2 * element_bytes, kChunkBytes);
      EXPECT_EQ(expected - t * tile / 4, places_per_word_column(element_bytes) / 2);
    }
    EXPECT_EQ(static_cast<int>(seen.size()), tile);
  }
}

// Where the map promises a constant distance between the keys of a thread's passes, it is so.
TEST(Sm80Maps, AdvancesAreTheDistancesOfPasses) {
  for (const int group_log2 : {1, 2}) {
    for (const bool interleaved : {false, true}) {
      for (const int pass : {2, 4, 8, 16, 32}) {
        const int apart = value_advance(pass, group_log2, interleaved);
        for (int row = 0; row + pass < kInterleaveBlock && apart > 0; ++row) {
          const auto key = [&](int place) { return key_in_block(place, group_log2, interleaved); };
          EXPECT_EQ(key(row + pass) - key(row), apart);
        }
      }
    }
  }
  for (const int element_bytes : {2, 4}) {
    for (const int group_log2 : {1, 2}) {
      for (const bool interleaved : {false, true}) {
        for (const int pass : {4, 8, 16, 32}) {
          const int apart = key_advance(pass, group_log2, interleaved);
          const auto key = [&](int column) {
            return key_in_block(place_of_column(column, element_bytes), group_log2, interleaved);
          };
          for (int column = 0; column + pass < tile_places(element_bytes) && apart > 0; ++column) {
            EXPECT_EQ(key(column + pass) - key(column), apart);
          }
        }
      }
    }
  }
  EXPECT_EQ(key_advance(rows_per_pass(128, 8), 2, true), 1);
  EXPECT_EQ(value_advance(rows_per_pass(128, 8), 2, false), 16);
  EXPECT_EQ(value_advance(rows_per_pass(256, 8), 2, true), 8);
}

// An ldmatrix reads one chunk of each of eight rows: together they must touch every bank once.
template <typename Offset>
void expect_swizzled(int rows, int chunks, Offset offset) {
  std::set<int> seen;
  for (int row = 0; row < rows; ++row) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      EXPECT_EQ(offset(row, chunk) % kChunkBytes, 0);
      EXPECT_TRUE(seen.insert(offset(row, chunk)).second);
    }
  }
  EXPECT_EQ(*seen.rbegin(), (rows * chunks - 1) * kChunkBytes);
  for (int row = 0; row < rows; row += 8) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      std::set<int> bank_groups;
      for (int i = 0; i < 8; ++i) bank_groups.insert(offset(row + i, chunk) % 128);
      EXPECT_EQ(bank_groups.size(), 8u);
    }
  }
}

TEST(Sm80Maps, SwizzledRowsAreOneToOneAndFreeOfConflicts) {
  for (const int row_bytes : {128, 256, 512, 1024}) {
    expect_swizzled(64, row_bytes / kChunkBytes,
                    [&](int row, int chunk) { return swizzled_wide(row, chunk, row_bytes); });
  }
  expect_swizzled(128, 4, [](int row, int chunk) { return swizzled_64(row, chunk); });
}

TEST(Sm90Maps, PanelsAreOneToOneAndFreeOfConflicts) {
  for (const int row_bytes : {128, 256}) {
    expect_swizzled(64, row_bytes / kChunkBytes,
                    [&](int row, int chunk) { return sm90::panel_offset(64, row, chunk); });
  }
}

// The words that count, those of lanes t = 0 and 1, are the two of rows g and g + 8 of the warp's half, in the order
// that mma.sp reads a whole unit in.
TEST(Sm90Maps, LanesGiveTheWordsOfTheirRows) {
  for (int row16 = 0; row16 < 128; row16 += 16) {
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      if (t > 1) continue;
      EXPECT_EQ(sm90::lane_word(row16, lane), metadata_word(128, row16 / 32 * 32, row16 / 16 % 2, g, t));
      EXPECT_EQ(sm90::lane_word(row16, lane) / 32, row16 / 32);
      EXPECT_EQ(sm90::lane_word(row16, lane) % 32, 4 * g + (row16 % 32 == 0 ? 0 : 2) + t);
    }
  }
}

// Every score belongs to exactly one CTA; CTAs of a plain matrix have enough rows to be worth their copy of K, and
// those of a block mask one block row.
TEST(Sm80Split, CoversTheMatrixOnce) {
  for (const std::int64_t places : {16, 32, 64, 100, 384, 512, 4096, 5000}) {
    for (const std::int64_t rows : {32, 64, 96, 256, 1000 / 32 * 32, 4096}) {
      for (const int block : {0, 64, 128}) {
        for (const int most : {1, 2, 3, 4, 8}) {
          QkPruneParams params;
          params.scores.places = places;
          params.scores.rows = rows;
          const std::int32_t column = 0;
          if (block > 0) {
            params.walk.block = block;
            params.walk.columns = &column;
          }
          const int tiles = split_tiles(params, 64, most);
          EXPECT_LE(tiles, most);
          EXPECT_GE(params.key_groups * tiles, parts(places, 64));
          EXPECT_LT((params.key_groups - 1) * tiles, parts(places, 64));
          split_rows(params, 32, 128, 264);
          EXPECT_EQ(params.row_tiles, parts(rows, params.rows_per_cta));
          EXPECT_EQ(params.rows_per_cta % (block > 0 ? block : 128), 0);
          if (block > 0) {
            EXPECT_EQ(params.rows_per_cta, block);
          }
        }
      }
    }
  }
  QkPruneParams params;
  params.scores.places = params.scores.rows = 4096;
  split_tiles(params, 64, 2);
  split_rows(params, 32, 128, 264);
  EXPECT_EQ(params.rows_per_cta, 2048);  // 32 matrices x 32 groups x 2: enough for 264 at once, six times over
}

TEST(Sm80Maps, PaddedFp32ValuesAreFreeOfConflicts) {
  for (const int head_dim : {64, 128}) {
    std::set<int> banks;
    for (int lane = 0; lane < 32; ++lane) banks.insert((lane % 4 * padded_floats(head_dim) + lane / 4) % 32);
    EXPECT_EQ(banks.size(), 32u);
  }
}

// The word that the kernels read and write is the codec's block of row g in its low half and of row g + 8 above it.
TEST(Sm80Maps, MetadataWordsAreTheCodecs) {
  const std::int64_t rows = 96;
  for (std::int64_t row32 = 0; row32 < rows; row32 += 32) {
    for (int half = 0; half < 2; ++half) {
      for (int g = 0; g < 8; ++g) {
        for (std::int64_t block = 0; block < 6; ++block) {
          const std::int64_t word = metadata_word(rows, row32, half, g, block);
          EXPECT_EQ(core::block_offset({row32 + 16 * half + g, block}, rows), 2 * word);
          EXPECT_EQ(core::block_offset({row32 + 16 * half + g + 8, block}, rows), 2 * word + 1);
        }
      }
    }
  }
}

// mma.sp takes the words of lanes t = 0, 1 (selector 0) or 2, 3 (selector 1): with word l of a 32-row unit in lane l,
// these are the first and second block of the upper and the lower 16 rows.
TEST(Sm80Maps, LaneLHoldsWordLOfAUnit) {
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, selector = lane % 4 / 2, block = lane % 2;
    EXPECT_EQ(metadata_word(32, 0, selector, g, block), lane);
  }
}

// Every visible key is in a block that is walked, for every alignment of rows and keys.
TEST(Sm80Walk, LeavesOutOnlyBlocksThatAreMaskedForAllRows) {
  const std::int32_t lengths[1] = {150};
  for (const std::int64_t n_q : {1, 100, 300}) {
    for (const std::int64_t n_k : {1, 128, 400}) {
      for (const std::int64_t left : {std::int64_t{0}, std::int64_t{90}, core::kUnbounded}) {
        for (const std::int64_t right : {std::int64_t{0}, std::int64_t{50}, core::kUnbounded}) {
          for (const bool bottom_right : {false, true}) {
            for (const bool limited : {false, true}) {
              BlockWalk walk;
              walk.band = {left, right, bottom_right};
              walk.n_q = n_q;
              walk.n_k = n_k;
              walk.key_blocks = static_cast<int>((n_k + 127) / 128);
              walk.skip_masked = true;
              if (limited) walk.key_lengths = lengths;
              for (int row_block = 0; row_block < static_cast<int>((n_q + 127) / 128); ++row_block) {
                const SlotRange slots = walk.slots(row_block, 0);
                EXPECT_LE(0, slots.begin);
                EXPECT_LE(slots.begin, slots.end);
                EXPECT_LE(slots.end, walk.key_blocks);
                for (std::int64_t row = 128 * row_block; row < std::min<std::int64_t>(n_q, 128 * row_block + 128);
                     ++row) {
                  const core::KeyRange range = walk.band.row(row, n_q, n_k, walk.key_length(0));
                  if (range.begin >= range.end) continue;
                  EXPECT_LE(slots.begin * 128, range.begin);
                  EXPECT_GE(slots.end * 128, range.end);
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST(Sm80Walk, LeavesOutWhatACausalMaskHides) {
  BlockWalk walk;
  walk.band.right = 0;
  walk.n_q = walk.n_k = 1024;
  walk.key_blocks = 8;
  walk.skip_masked = true;
  int walked = 0;
  for (int row_block = 0; row_block < 8; ++row_block) walked += walk.slots(row_block, 0).end;
  EXPECT_EQ(walked, 36);
}

TEST(Sm80Walk, FollowsTheLists) {
  const std::int32_t counts[3] = {2, 0, 1};
  const std::int32_t columns[6] = {1, 4, -1, -1, 2, -1};
  BlockWalk walk;
  walk.block = 64;
  walk.width = 2;
  walk.counts = counts;
  walk.columns = columns;
  EXPECT_EQ(walk.slots(0, 0).end, 2);
  EXPECT_EQ(walk.slots(1, 0).end, 0);
  EXPECT_EQ(walk.key_block(0, 1), 4);
  EXPECT_EQ(walk.key_block(2, 0), 2);
}

TEST(Sm80Walk, TilesCoverTheirBlock) {
  for (const int block : {64, 128}) {
    BlockWalk walk;
    walk.block = block;
    std::map<int, std::set<int>> places;
    for (int tile = 0; tile < 3 * (block / 32); ++tile) {
      places[walk.slot_of_tile<32>(tile)].insert(walk.place_in_block<32>(tile));
    }
    ASSERT_EQ(places.size(), 3u);
    for (const auto& [slot, starts] : places) {
      EXPECT_EQ(static_cast<int>(starts.size()), block / 32);
      EXPECT_EQ(*starts.rbegin(), block - 32);
    }
    EXPECT_EQ(walk.slot_of_tile<64>(block / 64), 1);
    EXPECT_EQ(walk.place_in_block<64>(block / 64 - 1), block - 64);
  }
}

}  // namespace
}  // namespace dspattn::cuda::pipeline
