// Which mean of V takes the weight of a row's pruned keys (docs/rest.md): that of the whole blocks of 128 keys in the
// interval the row sees, or of the interval itself where it holds no whole block. And where that mean stands in a table
// which a kernel writes before (blocks/means.h).
//
// Rows share means. Of whole blocks [first, last) both ends never fall from a row to the next, so that their sum tells
// the pairs apart: a table of a few entries for every block. Intervals without a whole block are a sequence's first
// keys, its last keys, or, where a window is narrower than two blocks, any. A mask tensor may hide all keys of a row's
// whole blocks, and then the mean is that of its interval: there every row has an entry.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/tile/key_map.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::tile {

// Keys [begin, end) that a row sees by diagonal, window and length.
struct KeyInterval {
  int begin = 0;
  int end = 0;
};

DSPATTN_HOST_DEVICE constexpr KeyInterval interval_of(const RowBand& band, int row) {
  return {band.begin(row), band.end(row)};
}

// The blocks that lie wholly in an interval: none where end <= begin.
DSPATTN_HOST_DEVICE constexpr KeyBlockRange whole_blocks(const KeyInterval& keys) {
  return {(keys.begin + kBlockKeys - 1) / kBlockKeys, keys.end < 0 ? 0 : keys.end / kBlockKeys};
}

// An interval of so many keys may hold no whole block.
inline constexpr int kLongestWithoutBlock = 2 * kBlockKeys - 2;
// Entries for a sequence's first keys, and for its last ones.
inline constexpr int kFirstKeys = kBlockKeys - 1;
inline constexpr int kLastKeys = kLongestWithoutBlock;

// How many entries a table has, and in which order: those of whole blocks of all sequences, then those of first and
// last keys, sequence by sequence, or of single rows. All of one head; sequences are those of a batch, or packed.
struct MeanTable {
  int per_block = 1;            // entries; 2 where windows bound the first key
  int blocks = 0;               // whole blocks of a sequence of n_k keys; packed: 0
  int rows = 0;                 // query rows of a sequence; packed: 0
  int by_row = 0;               // 1: an entry for every row that sees no whole block
  int all_rows = 0;             // 1: for every row
  int first_keys = 0;           // entries a sequence has for its first keys
  int last_keys = 0;            // and for its last ones
  std::int64_t all_blocks = 0;  // of all sequences
  int first_edge = 0;           // entry, after those of whole blocks
  std::int64_t entries = 0;     // within 32 bits where there is memory for them, as is their number in all heads

  // Rows of K and of Q before a sequence of a packed batch; of others 0.
  struct Sequence {
    int index = 0;
    int k_row = 0;
    int q_row = 0;
  };

  // No whole block of a sequence stands where one of another does, for a packed sequence begins at or after the end of
  // the one before.
  DSPATTN_HOST_DEVICE constexpr int block_of(const Sequence& sequence) const {
    return sequence.index * blocks + sequence.k_row / kBlockKeys;
  }
  DSPATTN_HOST_DEVICE constexpr int entry_of_blocks(const Sequence& sequence, const KeyBlockRange& range) const {
    return per_block * block_of(sequence) + range.begin + range.end - 1;
  }
  DSPATTN_HOST_DEVICE constexpr int edge_of(const Sequence& sequence) const {
    return first_edge + sequence.index * (first_keys + last_keys);
  }
  DSPATTN_HOST_DEVICE constexpr int entry_of_row(const Sequence& sequence, int row) const {
    return first_edge + sequence.index * rows + sequence.q_row + row;
  }

  // Of a row that sees a key; of others some entry.
  DSPATTN_HOST_DEVICE constexpr int entry(const Sequence& sequence, const RowBand& band, int row) const {
    const KeyInterval keys = interval_of(band, row);
    if (keys.end <= keys.begin) return 0;
    const KeyBlockRange whole = whole_blocks(keys);
    if (all_rows == 0 && whole.end > whole.begin) return entry_of_blocks(sequence, whole);
    if (by_row != 0) return entry_of_row(sequence, row);
    if (keys.begin == 0) return edge_of(sequence) + keys.end - 1;
    return edge_of(sequence) + first_keys + band.key_length - keys.begin - 1;
  }
};

// Entries that stand one behind the other, one for every 128 rows but for the first, where the rows of a row tile see
// all keys before their last: what a kernel fetches for all of them at once. Rows that see no whole block, and rows of
// windows, have entries of their own.
struct TileMeans {
  int first_entry = 0;
  int count = 0;        // of entries; 0: no row has one of these
  int second_from = 0;  // row of the tile from which on it is the next one, as again after 128 rows more
  int slot = -1;        // among them, of rows before that; -1: those have an entry of their own

  // Of a row of the tile.
  DSPATTN_HOST_DEVICE constexpr int slot_of(int row) const {
    const int own = slot + (row >= second_from ? 1 : 0) + (row >= second_from + kBlockKeys ? 1 : 0);
    return own < count ? own : count - 1;
  }
};

// Of rows [first, last] of a sequence.
DSPATTN_HOST_DEVICE constexpr TileMeans tile_means(const MeanTable& table, const MeanTable::Sequence& sequence,
                                                   const RowBand& band, int first, int last) {
  TileMeans means;
  const int end = band.end(first);
  const int blocks = end / kBlockKeys, all_blocks = band.end(last) / kBlockKeys;
  if (table.by_row != 0 || table.per_block != 1 || last < first || end <= 0 || all_blocks == 0) return means;
  const int least = blocks > 0 ? blocks : 1;
  means.first_entry = table.entry_of_blocks(sequence, {0, least});
  means.count = all_blocks - least + 1;
  means.second_from = all_blocks > blocks ? (blocks + 1) * kBlockKeys - end : kMaxRows;
  means.slot = blocks > 0 ? 0 : -1;
  return means;
}

// Of which problem.
struct MeanQuestion {
  int left = kMaxRows, right = kMaxRows;  // reach of the band
  int sequences = 1;
  int n_q = 0, n_k = 0;  // of a sequence; packed: of the longest
  bool packed = false;
  bool masked = false;         // by a tensor
  bool lengths_known = true;   // false: only the device knows how many keys a sequence has
  int q_rows = 0, k_rows = 0;  // of the tensors, where packed
};

constexpr MeanTable mean_table(const MeanQuestion& asked) {
  MeanTable table;
  const bool bounded_left = asked.left < kMaxRows;
  const bool bounded = bounded_left || asked.right < kMaxRows;
  const std::int64_t width = std::int64_t{asked.left} + asked.right + 1;
  table.per_block = bounded_left ? 2 : 1;
  table.blocks = asked.packed ? 0 : asked.n_k / kBlockKeys;
  table.rows = asked.packed ? 0 : asked.n_q;
  table.by_row = asked.masked || width <= kLongestWithoutBlock ? 1 : 0;
  table.all_rows = asked.masked ? 1 : 0;
  const bool has_edges = bounded || asked.packed || !asked.lengths_known || asked.n_k < kBlockKeys;
  if (has_edges && table.by_row == 0) {
    table.first_keys = kFirstKeys;
    table.last_keys = bounded_left ? kLastKeys : 0;
  }
  const std::int64_t sequences = asked.sequences;
  table.all_blocks = asked.packed ? asked.k_rows / kBlockKeys : sequences * table.blocks;
  table.first_edge = asked.masked ? 0 : static_cast<int>(table.per_block * table.all_blocks);
  const std::int64_t edges = table.by_row != 0 ? (asked.packed ? asked.q_rows : sequences * asked.n_q)
                                               : sequences * (table.first_keys + table.last_keys);
  table.entries = table.first_edge + edges;
  return table;
}

// What is written before a kernel runs: the table, [heads][entries][columns] fp32, then sums of V over every whole
// block, alike, and of how many keys each is, [heads][all_blocks]. The latter two begin at these bytes.
struct MeansBytes {
  std::size_t sums = 0, counts = 0, total = 0;
};

constexpr MeansBytes means_bytes(const MeanTable& table, std::int64_t heads, int columns) {
  const auto bytes_of = [heads](std::int64_t rows, std::int64_t each) {
    return static_cast<std::size_t>(heads * rows * each) * sizeof(float);
  };
  MeansBytes bytes;
  bytes.sums = bytes_of(table.entries, columns);
  bytes.counts = bytes.sums + bytes_of(table.all_blocks, columns);
  bytes.total = bytes.counts + bytes_of(table.all_blocks, 1);
  return bytes;
}

}  // namespace dspattn::cuda::tile
