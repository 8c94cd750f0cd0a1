// Which work a persistent CTA does, in which order, and which key blocks of an item are masked how.
//
// An item is a tile of query rows of one (sequence, head). A worker is a CTA, or a pair of CTAs that share their loads.
// In every round each worker takes one item, or none. Items of equal cost are taken head by head: the workers that run
// at once then share few heads' K and V, which the L2 cache keeps; with every sweep over the workers they move on to
// other row tiles. Where the last row tile of a head is shorter and cheaper, those of the last heads come at the very
// end: that evens out what is left. Items of unequal cost (causal masks, windows, packed batches) are taken either head
// by head too, every other sweep mirrored, or section by section: a section is a few heads; within it the row tiles
// come last first, because under a causal mask the last tiles see the most keys, and the heads of a row tile follow
// each other. Workers sweep over the items to and fro (0..G-1, G-1..0, ...), which evens out costs that fall steadily,
// and start every other section from the other end, which evens out what a section leaves.
#pragma once

#include <cstdint>

#include "cuda/tile/divisor.h"
#include "cuda/tile/key_map.h"

namespace dspattn::cuda::tile {

struct ItemOrder {
  int sequence_heads = 0;  // sequences * heads, all heads of a sequence together
  Divisor row_tiles{};     // per sequence (of a packed batch: of the longest)
  Divisor workers{};       // CTAs, or pairs of them
  Divisor sweeps{};        // per section
  int by_sections = 0;     // 0: head by head, one section
  Divisor section_heads{};
  Divisor last_section_heads{};
  int shift = 0;     // head by head: positions a worker moves on with every sweep
  int mirrored = 0;  // head by head: every other sweep runs the other way
  int rounds = 0;    // of every CTA: sections * sweeps; in some it has nothing to do

  // Head by head: from this round and this head on, all row tiles but the last of every head, `whole_items` together,
  // then those last ones.
  int end_round = 0;
  int end_head = 0;
  int whole_items = 0;
  Divisor whole_tiles{};  // a head
};

constexpr int divide_up(std::int64_t a, std::int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Head by head. short_last: the last row tile of a head has fewer rows than the others.
constexpr ItemOrder equal_order(int sequence_heads, int row_tiles, int workers, bool short_last) {
  const auto sweeps_of = [&](int heads, int tiles) { return divide_up(std::int64_t{heads} * tiles, workers); };
  // A shift that moves every CTA to the next row tile with every sweep: after as many sweeps as a head has row tiles,
  // and as many heads as there are workers, every worker has had each of them once.
  const int shift = (row_tiles + 1 - workers % row_tiles) % row_tiles % workers;
  // Of the heads that are left then, the short ones may come last, where that is shorter for the CTAs with the
  // most to do: a short one taken for half of a whole one. (Where it is not, n = 16384 with tiles of 192, it was 4 %
  // slower.)
  const int left = sequence_heads % workers;
  const int sweeps = sweeps_of(left, row_tiles);
  const bool has_end =
      short_last && row_tiles > 1 && 2 * sweeps_of(left, row_tiles - 1) < 2 * sweeps - sweeps / row_tiles;
  const int end_heads = has_end ? left : 0;
  const int end_round = sweeps_of(sequence_heads - end_heads, row_tiles);
  const int rounds = end_round + sweeps_of(end_heads, row_tiles);
  return {.sequence_heads = sequence_heads,
          .row_tiles = Divisor(row_tiles),
          .workers = Divisor(workers),
          .sweeps = Divisor(rounds),
          .shift = shift,
          .rounds = rounds,
          .end_round = end_round,
          .end_head = sequence_heads - end_heads,
          .whole_items = end_heads * (row_tiles - 1),
          .whole_tiles = Divisor(has_end ? row_tiles - 1 : 1)};
}

// Head by head, every other sweep mirrored: a CTA's row tiles of two sweeps then add up to the same cost under
// a causal mask. All row tiles of a head are in work at once.
constexpr ItemOrder mirrored_order(int sequence_heads, int row_tiles, int workers) {
  ItemOrder order = equal_order(sequence_heads, row_tiles, workers, false);
  order.shift = order.mirrored = 1;
  return order;
}

// By sections of a few heads, of which each of `workers` gets a few items: one per sweep. Two sweeps
// balance causal masks best: a sweep and its mirror image pair the dearest row tile with the cheapest. Tiles of 192
// rows need more, because common lengths are no multiple of that and the last row tile, much shorter, is not the
// dearest (tests/cuda/tile_walk_test.cpp: within 5 %). The fewer, the fewer heads' K and V the L2 cache must hold.
// Heads that share K and V (groups of heads_per_kv_head) stay together.
constexpr ItemOrder unequal_order(int sequence_heads, int row_tiles, int heads_per_kv_head, int workers, int tile_q) {
  const int wanted = tile_q % 128 == 0 ? 2 : row_tiles <= 8 ? 3 : 4;
  const std::int64_t fit = std::int64_t{wanted} * workers / row_tiles;  // rounded down: no sweep is begun for a few
  const int heads = divide_up(fit > 0 ? fit : 1, heads_per_kv_head) * heads_per_kv_head;
  const int section = heads < sequence_heads ? heads : sequence_heads;
  const int sweeps = divide_up(static_cast<std::int64_t>(section) * row_tiles, workers);
  const int sections = divide_up(sequence_heads, section);
  return {.sequence_heads = sequence_heads,
          .row_tiles = Divisor(row_tiles),
          .workers = Divisor(workers),
          .sweeps = Divisor(sweeps),
          .by_sections = 1,
          .section_heads = Divisor(section),
          .last_section_heads = Divisor(sequence_heads - (sections - 1) * section),
          .rounds = sections * sweeps};
}

struct ItemIndex {
  int sequence_head;
  int row_tile;  // negative: no item in this round
};

// What worker `worker` does in round `round` of those that end a walk head by head.
DSPATTN_HOST_DEVICE constexpr ItemIndex item_at_end(const ItemOrder& order, int round, int worker) {
  const int begin = round * order.workers.value;
  // A sweep of short ones alone begins with the CTAs that had one in the sweep before.
  const int rank = begin + (begin > order.whole_items ? order.workers.value - 1 - worker : worker);
  if (rank < order.whole_items) {
    const int head = order.whole_tiles.quotient(rank);
    return {order.end_head + head, rank - head * order.whole_tiles.value};
  }
  const int head = order.end_head + rank - order.whole_items;
  return {head, head < order.sequence_heads ? order.row_tiles.value - 1 : -1};
}

// What worker `worker` does in its round `round`. kMayEnd: the order may have an end; where none has one, the code
// for it is not missed.
template <bool kMayEnd = true>
DSPATTN_HOST_DEVICE constexpr ItemIndex item_of_round(const ItemOrder& order, int round, int worker) {
  const int workers = order.workers.value;
  if (order.by_sections == 0) {
    if (kMayEnd && round >= order.end_round) return item_at_end(order, round - order.end_round, worker);
    const int moves = order.mirrored != 0 ? round / 2 : round;
    int position = order.workers.remainder(worker + order.workers.remainder(moves) * order.shift);
    if (order.mirrored != 0 && (round & 1) != 0) {
      // The ranks of a CTA's two items add up to -1, modulo the row tiles.
      const int ahead = order.workers.remainder(order.row_tiles.remainder(2 * round * workers));
      position = order.workers.remainder(2 * workers - 1 - position - ahead);
    }
    const int rank = round * workers + position;
    const int head = order.row_tiles.quotient(rank);
    return {head, head < order.sequence_heads ? rank - head * order.row_tiles.value : -1};
  }
  const int section = order.sweeps.quotient(round);
  const int sweep = round - section * order.sweeps.value;
  const int rank = sweep * workers + (((sweep ^ section) & 1) != 0 ? workers - 1 - worker : worker);
  const int first_head = section * order.section_heads.value;
  const bool last = order.sequence_heads - first_head <= order.section_heads.value;
  const Divisor heads = last ? order.last_section_heads : order.section_heads;
  const int row_tile = heads.quotient(rank);
  return {first_head + rank - row_tile * heads.value, order.row_tiles.value - 1 - row_tile};
}

// How many items worker `worker` has where they are taken head by head: one a round, but perhaps for the last.
template <bool kMayEnd = true>
DSPATTN_HOST_DEVICE constexpr int items_of_worker(const ItemOrder& order, int worker) {
  return item_of_round<kMayEnd>(order, order.rounds - 1, worker).row_tile < 0 ? order.rounds - 1 : order.rounds;
}

// Of `workers` CTAs, or pairs of them, as many as are needed to take `items` equal items in as few rounds: more would
// idle in the last one, and take power and bandwidth from the others before (docs/log/forward.md).
constexpr int workers_needed(std::int64_t items, int workers) {
  const int rounds = divide_up(items, workers);
  return rounds > 0 ? divide_up(items, rounds) : 0;
}

// Key blocks [begin, end), of 128 keys each.
struct KeyBlockRange {
  int begin = 0;
  int end = 0;
};

// The diagonal mask in 32 bits: query row i sees keys [i + diagonal - left, i + diagonal + right], within the length.
struct RowBand {
  int left = 0;
  int right = 0;
  int diagonal = 0;    // of this sequence: n_k - n_q, or 0 when aligned top left
  int key_length = 0;  // keys at and past it are masked or absent

  DSPATTN_HOST_DEVICE constexpr int begin(int row) const {
    const int first = row + diagonal - left;
    return first > 0 ? first : 0;
  }
  DSPATTN_HOST_DEVICE constexpr int end(int row) const {
    const int last = row + diagonal + right + 1;
    return last < key_length ? last : key_length;
  }
};

// Longest sequences, and bounds of windows: RowBand's sums stay within 32 bits.
inline constexpr int kMaxRows = 1 << 29;

constexpr int clamped_reach(std::int64_t reach) {
  return static_cast<int>(reach > kMaxRows ? kMaxRows : reach < -kMaxRows ? -kMaxRows : reach);
}

// The blocks that any of rows [first, last] sees; begin and end never fall from a row to the next.
DSPATTN_HOST_DEVICE constexpr KeyBlockRange visible_key_blocks(const RowBand& band, int first, int last) {
  if (last < first) return {0, 0};
  const int begin = band.begin(first);
  const int end = band.end(last);
  if (end <= begin) return {0, 0};
  return {begin / kBlockKeys, (end + kBlockKeys - 1) / kBlockKeys};
}

// The blocks all of whose keys all of rows [first, last] see: no masking there.
DSPATTN_HOST_DEVICE constexpr KeyBlockRange interior_key_blocks(const RowBand& band, int first, int last) {
  if (last < first) return {0, 0};
  const int begin = (band.begin(last) + kBlockKeys - 1) / kBlockKeys;
  const int end = band.end(first) > 0 ? band.end(first) / kBlockKeys : 0;
  return end > begin ? KeyBlockRange{begin, end} : KeyBlockRange{0, 0};
}

}  // namespace dspattn::cuda::tile
