// Which work the CTAs of the fused backward do, and in which order their shares of a dQ are added up.
//
// An item is a key tile of one (sequence, key head): a CTA walks the query tiles that see it, of all heads that share
// the key head. Items are numbered in the order in which CTAs take them; within a (sequence, key head) the last key
// tile comes first.
//
// A query tile's dQ is the sum of shares of many CTAs, and sums of floats depend on their order. So shares are added
// from the last key tile down to the first, each when a counter says that the one before is in. A CTA therefore waits
// only for items with lower numbers. Those were taken before its own, by CTAs that run; of all items in work the lowest
// waits for nobody, so that whatever else the GPU does, some CTA always goes on: no deadlock.
//
// And hardly a wait: where the diagonal bounds what a row sees, the last key tile that a query tile sees is the one
// whose walk begins there, one key tile below it arrives a step later, and so on. Where every row sees all keys,
// walks that began at the first query tile would all want the same one. There key tile j begins with the query tile at
// its own place, and when it has come to the end goes on with the first ones (`wraps`); what it adds on that second
// stretch goes to a second sum, or it would have to wait for CTAs with higher numbers.
#pragma once

#include <cstdint>

#include "cuda/tile/tile_range.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::tile {

// The quotient rounded down, of negative numbers too.
DSPATTN_HOST_DEVICE constexpr int floor_divide(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// Key blocks that rows [first, last] may see: all that lie between the first row's first key and the last row's last.
DSPATTN_HOST_DEVICE constexpr KeyBlockRange key_blocks_of(const RowBand& band, int first, int last) {
  const int lowest = floor_divide(first + band.diagonal - band.left, kBlockKeys);
  const int highest = floor_divide(last + band.diagonal + band.right, kBlockKeys) + 1;
  const int blocks = (band.key_length + kBlockKeys - 1) / kBlockKeys;
  return {lowest > 0 ? lowest : 0, highest < blocks ? highest : blocks};
}

// Query tiles, of tile_q rows each, of a sequence of `rows` rows whose key_blocks_of contain `block`.
DSPATTN_HOST_DEVICE constexpr TileRange query_tiles_of(const RowBand& band, int rows, int block, int tile_q) {
  if (block * kBlockKeys >= band.key_length || rows <= 0) return {0, 0};
  const int first_row = block * kBlockKeys - band.diagonal - band.right;          // that sees the block's begin
  const int last_row = (block + 1) * kBlockKeys - 1 - band.diagonal + band.left;  // that sees its end
  const int tiles = (rows + tile_q - 1) / tile_q;
  if (first_row >= rows || last_row < 0) return {0, 0};
  const int begin = first_row > 0 ? first_row / tile_q : 0;
  const int end = last_row / tile_q + 1;
  return {begin, end < tiles ? end : tiles};
}

// Those all of whose rows see all keys of the block.
DSPATTN_HOST_DEVICE constexpr TileRange inside_tiles_of(const RowBand& band, int rows, int block, int tile_q) {
  if ((block + 1) * kBlockKeys > band.key_length || rows <= 0) return {0, 0};
  const int first_row = (block + 1) * kBlockKeys - 1 - band.diagonal - band.right;  // that sees the block's end
  const int last_row = block * kBlockKeys - band.diagonal + band.left;              // that sees its begin
  const int tiles = (rows + tile_q - 1) / tile_q;
  const int begin = first_row > 0 ? (first_row + tile_q - 1) / tile_q : 0;
  const int end = last_row >= rows - 1 ? tiles : last_row >= 0 ? (last_row + 1) / tile_q : 0;
  return begin < end ? TileRange{begin, end} : TileRange{0, 0};
}

// Where a walk over `tiles` begins.
DSPATTN_HOST_DEVICE constexpr int first_of_walk(const TileRange& tiles, int block, int tile_q, bool wraps) {
  const int beside = block * kBlockKeys / tile_q;
  if (!wraps || beside < tiles.begin) return tiles.begin;
  return beside < tiles.end ? beside : tiles.begin;
}

// Its query tile number `step`.
DSPATTN_HOST_DEVICE constexpr int tile_of_step(const TileRange& tiles, int first, int step) {
  const int tile = first + step;
  return tile < tiles.end ? tile : tile - tiles.count();
}

// Which of a query tile's two sums a share goes to, and how many shares of that sum come before it.
struct Turn {
  int sum;
  int before;
};

// Of key tile `part` of `parts` of block `block`.
DSPATTN_HOST_DEVICE constexpr Turn turn_of(const KeyBlockRange& seen, int tile, int tile_q, int block, int part,
                                           int parts, bool wraps) {
  const int beside = tile * tile_q / kBlockKeys;  // the last block whose walk begins at this tile or before
  const bool second = wraps && block > beside;
  const int last = wraps && !second && beside < seen.end - 1 ? beside : seen.end - 1;
  return {second ? 1 : 0, (last - block) * parts + parts - 1 - part};
}

// The same where shares are added from the first key tile up: there is one sum.
DSPATTN_HOST_DEVICE constexpr Turn ascending_turn_of(const KeyBlockRange& seen, int block, int part, int parts) {
  return {0, (block - seen.begin) * parts + part};
}

// How many shares a sum has in all. The first is stored, not added: a sum without any holds anything.
DSPATTN_HOST_DEVICE constexpr int shares_of(const KeyBlockRange& seen, int tile, int tile_q, int parts, bool wraps,
                                            int sum) {
  const int after = tile * tile_q / kBlockKeys + 1;  // blocks from there on belong to the second sum
  const int split = !wraps || after > seen.end ? seen.end : after < seen.begin ? seen.begin : after;
  const int blocks = sum == 0 ? split - seen.begin : seen.end - split;
  return blocks > 0 ? blocks * parts : 0;
}

// Query tiles of all sequences lie one behind the other in the workspace: the first of a sequence whose rows begin at
// `begin` of a packed tensor. Ranges of sequences that follow each other do not overlap: for a sequence of `count` rows
// begin / t + ceil(count / t) <= (begin + count) / t + 1.
DSPATTN_HOST_DEVICE constexpr int first_packed_tile(int begin, int sequence, int tile_q) {
  return begin / tile_q + sequence;
}

// Item `item`: of which (sequence, key head), and which key tile of `key_tiles`. Heads come in groups, and their key
// tiles in turn: the neighbours of a head are then begun further apart, which gives each time to add its shares before
// the next one asks for them.
//
// Under a diagonal the last key tiles have the shortest walks, so that the longest are begun last, and most CTAs would
// be idle at the end. The last group therefore goes the other way (`ascends`): first key tiles first, walks from their
// last query tile back, shares added from the first key tile up. Earlier groups do not: at the kernel's begin such
// walks would all want the last query tile.
struct GradientItem {
  int sequence_head;
  int key_tile;
  bool ascends;
};
struct GradientItems {
  Divisor key_tiles;
  int heads = 1;              // (sequence, key head) pairs
  Divisor group;              // of heads; where they are no multiple of it, the first has fewer
  Divisor first_group;        // heads of the first
  bool last_ascends = false;  // the last group does

  constexpr GradientItems() = default;
  constexpr GradientItems(Divisor tiles, int all_heads, int heads_of_group, bool ascends = false)
      : key_tiles(tiles),
        heads(all_heads),
        group(heads_of_group),
        first_group(all_heads % heads_of_group != 0 ? all_heads % heads_of_group : heads_of_group),
        last_ascends(ascends) {}

  // One thread of a CTA asks, and others wait for it: no division.
  DSPATTN_HOST_DEVICE constexpr GradientItem item(int index) const {
    const int absent = group.value - first_group.value;
    const int row = key_tiles.quotient(index);  // as if groups were rows of heads: all before a group are whole
    const int first = group.quotient(row + absent) * group.value - absent;
    const int begin = first > 0 ? first : 0;
    const Divisor& size = first >= 0 ? group : first_group;
    const int within = index - begin * key_tiles.value;
    const int turn = size.quotient(within);
    const bool ascends = last_ascends && first + group.value == heads;
    return {begin + within - turn * size.value, ascends ? turn : key_tiles.value - 1 - turn, ascends};
  }
};

// An fp32 sum of a query tile lies as threads hold it: in panels of 64 x 64, and there four registers of each of 128
// threads after the other. Row and column of register i (0..3) of group `four` of thread `thread`: of the panel.
DSPATTN_HOST_DEVICE constexpr int sum_row(int thread, int i) {
  return (thread >> 5) * 16 + ((thread & 31) >> 2) + (i >> 1) * 8;
}
DSPATTN_HOST_DEVICE constexpr int sum_column(int four, int thread, int i) {
  return 8 * four + 2 * (thread & 3) + (i & 1);
}

}  // namespace dspattn::cuda::tile
