// The order of items when only the device knows what they cost: packed batches and key lengths.
//
// A table in the workspace, written by a kernel of one CTA (blocks/schedule.h), lists the sequences from
// the one with the most keys down, each as often as it has row tiles. CTAs take the next item from a counter
// when they are done with one: what is left at the end is the shortest sequences' items, so all end at about the same
// time. Results do not depend on who takes what.
//
// Within a sequence items are taken head by head; under a diagonal mask by sections of a few heads, their last row
// tiles first, as in walk.h and for the same reasons.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/tile/walk.h"

namespace dspattn::cuda::tile {

struct ScheduleEntry {
  int sequence;
  int first;  // entry of the sequence's first
};

struct alignas(16) ScheduleHeader {
  int taken;    // items taken beyond every CTA's first
  int entries;  // sequences times their row tiles
};

// Row tiles of at least this many query rows: what a table must have room for.
inline constexpr int kLeastTileRows = 128;

constexpr std::size_t schedule_bytes(std::int64_t entries) {
  return sizeof(ScheduleHeader) + static_cast<std::size_t>(entries) * sizeof(ScheduleEntry);
}

// Sequences are sorted by their number of keys, in buckets of 2^shift keys: shift for sequences of up to `keys`.
inline constexpr int kBuckets = 1024;
constexpr int bucket_shift(int keys) {
  int shift = 0;
  while (keys >> shift >= kBuckets) ++shift;
  return shift;
}
// Of a sequence; the first bucket holds the longest.
DSPATTN_HOST_DEVICE constexpr int bucket_of(int keys, int shift) {
  const int short_of = kBuckets - 1 - (keys >> shift);
  return short_of > 0 ? short_of : 0;
}

// Heads of a section, of a sequence with `row_tiles` row tiles: two items for each of `workers`.
DSPATTN_HOST_DEVICE constexpr int section_heads_of(int row_tiles, int heads, int heads_per_kv_head, int workers) {
  const int fit = 2 * workers / row_tiles;
  const int wanted = (fit / heads_per_kv_head + 1) * heads_per_kv_head;
  return wanted < heads ? wanted : heads;
}

// Item `rank` of a sequence's heads x row_tiles. section_heads: 0 for head by head.
DSPATTN_HOST_DEVICE constexpr ItemIndex item_of_sequence(int sequence, int rank, int row_tiles, int heads,
                                                         int section_heads) {
  if (section_heads == 0) {
    const int head = rank / row_tiles;
    return {sequence * heads + head, rank - head * row_tiles};
  }
  const int first = rank / (section_heads * row_tiles) * section_heads;
  const int in_section = rank - first * row_tiles;
  const int count = heads - first < section_heads ? heads - first : section_heads;
  return {sequence * heads + first + in_section % count, row_tiles - 1 - in_section / count};
}

// The same for pairs of CTAs, of which a sequence has half as many items: two row tiles of a head, or, where
// their number is odd, the last ones of two heads. `second`: for the pair's second CTA. The number of heads is even.
DSPATTN_HOST_DEVICE constexpr ItemIndex pair_item_of_sequence(int rank, int row_tiles, int heads, int second) {
  const int of_head = row_tiles / 2;
  const int last = rank - heads * of_head;
  if (last >= 0) return {2 * last + second, row_tiles - 1};
  const int head = rank / of_head;
  return {head, 2 * (rank - head * of_head) + second};
}

}  // namespace dspattn::cuda::tile
