// Sums over intervals of items, keys or blocks of keys, by a warp: interval i is lane i's. Their ends never fall from
// one to the next and step by one at most. Where all of them hold a common place, the pivot, items are added from the
// pivot down and from the pivot up, each twice at most instead of once for every interval; where not, each by itself.
// Nothing is subtracted: what lies outside an interval, be it NaN, is in none of its sums.
#pragma once

#include <cstdint>

#include "cuda/tile/means.h"

namespace dspattn::cuda::blocks {

// A lane's columns.
template <int kColumns>
struct ColumnSums {
  float of[kColumns] = {};

  __device__ __forceinline__ void add(const ColumnSums& other) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) of[i] += other.of[i];
  }
};

// The first kIntervals of a warp's intervals. Items have a type for a lane's Word of an item and its Sums, and
//   cursor(i)                where item i is; that of the next one is a step further
//   load_if(there, cursor)   a word; of no item Word{}, which adds nothing
//   sums(word), between(begin, end)
// emit(i, sums) is called in turn, by all lanes.
template <int kIntervals, typename Items, typename Emit>
__device__ __forceinline__ void sum_intervals(const tile::KeyInterval& own, const Items& items, const Emit& emit) {
  const int pivot = __shfl_sync(~0u, own.begin, kIntervals - 1);
  const int first_end = __shfl_sync(~0u, own.end, 0);
  if (pivot > first_end) {
#pragma unroll 1
    for (int i = 0; i < kIntervals; ++i) {
      const int begin = __shfl_sync(~0u, own.begin, i);
      const int end = __shfl_sync(~0u, own.end, i);
      emit(i, items.between(begin, end));
    }
    return;
  }
  // Bit i: interval i has an item before those of i + 1, or behind those of i - 1.
  const std::uint32_t before = __ballot_sync(~0u, __shfl_down_sync(~0u, own.begin, 1) > own.begin);
  const std::uint32_t behind = __ballot_sync(~0u, own.end > __shfl_up_sync(~0u, own.end, 1));
  // Loads are on their way together, before the first word is added.
  typename Items::Word words[kIntervals] = {};
  auto cursor = items.cursor(pivot);
#pragma unroll
  for (int i = kIntervals - 2; i >= 0; --i) {
    const std::uint32_t there = before & 1u << i;
    if (there != 0) cursor -= items.step;
    words[i] = items.load_if(there, cursor);
  }
  typename Items::Sums below[kIntervals];
#pragma unroll
  for (int i = kIntervals - 2; i >= 0; --i) {
    below[i] = below[i + 1];
    below[i].add(items.sums(words[i]));
  }
  typename Items::Sums above = items.between(pivot, first_end);
  cursor = items.cursor(first_end);
#pragma unroll
  for (int i = 1; i < kIntervals; ++i) {
    const std::uint32_t there = behind & 1u << i;
    words[i] = items.load_if(there, cursor);
    if (there != 0) cursor += items.step;
  }
#pragma unroll
  for (int i = 0; i < kIntervals; ++i) {
    if (i > 0) above.add(items.sums(words[i]));
    below[i].add(above);
    emit(i, below[i]);
  }
}

}  // namespace dspattn::cuda::blocks
