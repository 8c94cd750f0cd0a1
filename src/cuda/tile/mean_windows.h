// Which means the rows of a windowed problem ask for (tile/means.h), as intervals of keys, or of blocks, whose ends
// never fall from one to the next and step by one at most: neighbours are added up together (blocks/interval_sums.h).
#pragma once

#include "cuda/tile/lengths.h"
#include "cuda/tile/means.h"

namespace dspattn::cuda::tile {

// What a row sees, with ends in [0, key_length]: the end of an empty interval may lie before its begin.
DSPATTN_HOST_DEVICE constexpr KeyInterval keys_within(const RowBand& band, int row) {
  const KeyInterval keys = interval_of(band, row);
  return {keys.begin < band.key_length ? keys.begin : band.key_length, keys.end > 0 ? keys.end : 0};
}

// Whether a row that sees these keys has an entry of its own, neither of whole blocks nor of first keys.
DSPATTN_HOST_DEVICE constexpr bool has_own_entry(const MeanTable& table, const KeyInterval& keys) {
  const KeyBlockRange whole = whole_blocks(keys);
  return keys.end > keys.begin && whole.end <= whole.begin && (table.by_row != 0 || keys.begin > 0);
}

// Windows of 255 keys and more. Pairs of whole blocks have ranks, begin + end - 1, in the order of rows. There are so
// many:
DSPATTN_HOST_DEVICE constexpr int block_ranks(int key_length) {
  const int blocks = key_length / kBlockKeys;
  return blocks > 0 ? 2 * blocks - 1 : 0;
}

// The blocks of a rank, if any row sees such; others may be empty. In a window of w keys end - begin is w / 128 or one
// less, as far as there are blocks.
DSPATTN_HOST_DEVICE constexpr KeyBlockRange blocks_of_rank(const RowBand& band, int rank) {
  const int in_window = (band.left + band.right + 1) / kBlockKeys;
  const int least = rank + 1 - band.key_length / kBlockKeys;  // the end is one of the sequence's
  int begin = (rank + 2 - in_window) >> 1;                    // rounded down
  if (begin < least) begin = least;
  if (begin < 0) begin = 0;
  return {begin, rank + 1 - begin};
}

// And the rows that see a sequence's last keys alone: no whole block, nor its first key. There are kLastKeys at most.
DSPATTN_HOST_DEVICE constexpr RowSpan rows_of_last_keys(const RowBand& band, int rows) {
  const int blocks = band.key_length / kBlockKeys;
  const int first_key = blocks > 0 ? (blocks - 1) * kBlockKeys + 1 : 1;
  const int key_to_row = band.left - band.diagonal;
  const int begin = clamp_length(first_key + key_to_row, 0, rows);
  return {begin, clamp_length(band.key_length + key_to_row, begin, rows) - begin};
}

// Narrower windows: the first row that sees a block as a whole, if any does.
DSPATTN_HOST_DEVICE constexpr int first_row_with(const RowBand& band, int block) {
  const int row = (block + 1) * kBlockKeys - band.diagonal - band.right - 1;
  return row > 0 ? row : 0;
}

// The keys that a CTA needs for the means of some rows that follow each other, [begin, end), and how they lie in its
// shared memory: from a place that is a multiple of kSegmentKeys on, so that segments are parts of whole blocks.
inline constexpr int kSegmentKeys = 16;
inline constexpr int kRowsOfChunk = 256;

struct ChunkKeys {
  KeyInterval keys;

  DSPATTN_HOST_DEVICE constexpr int first_place() const { return keys.begin / kSegmentKeys * kSegmentKeys; }
  // From that place on. Of the first one some keys may not be needed, and nor is its sum then.
  DSPATTN_HOST_DEVICE constexpr int segments() const { return (keys.end - first_place()) / kSegmentKeys; }
};

// Of rows [first, last), at most kRowsOfChunk.
DSPATTN_HOST_DEVICE constexpr ChunkKeys chunk_keys(const RowBand& band, int first, int last) {
  return {{keys_within(band, first).begin, keys_within(band, last - 1).end}};
}

// Places for the keys of any chunk of rows that have entries of their own: whole segments.
constexpr int chunk_places(const MeanTable& table, int left, int right) {
  const int longest = table.by_row != 0 ? left + right + kRowsOfChunk : kLastKeys;
  return ((longest > 0 ? longest : 0) + 2 * kSegmentKeys - 2) / kSegmentKeys * kSegmentKeys;
}
inline constexpr int kMostChunkPlaces = chunk_places({.by_row = 1}, kLongestWithoutBlock - 1, 0);

}  // namespace dspattn::cuda::tile
