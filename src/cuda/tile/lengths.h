// The device tensors that say how long sequences are: packed batches' cumulative lengths, and key lengths.
//
// Only the device knows their contents, which may be anything: negative, beyond the tensors, decreasing. Whatever they
// hold, what is read here stays within the tensors; a sequence that would end before it begins is empty.
#pragma once

#include <cstdint>

#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

// Elements of an int32 tensor any distance apart; null: there is none.
struct LengthsView {
  const std::int32_t* data = nullptr;
  std::int64_t stride = 1;

  DSPATTN_HOST_DEVICE constexpr bool present() const { return data != nullptr; }
  DSPATTN_HOST_DEVICE constexpr int at(int index) const { return data[index * stride]; }
};

DSPATTN_HOST_DEVICE constexpr int clamp_length(int length, int least, int most) {
  return length < least ? least : length > most ? most : length;
}

// Rows [begin, begin + count) of a packed tensor.
struct RowSpan {
  int begin = 0;
  int count = 0;
};

// Sequence `sequence` of a packed tensor of `total` rows, of which at most `longest` count.
DSPATTN_HOST_DEVICE constexpr RowSpan packed_span(const LengthsView& cumulative, int sequence, int total, int longest) {
  const int begin = clamp_length(cumulative.at(sequence), 0, total);
  const int end = clamp_length(cumulative.at(sequence + 1), begin, total);
  return {begin, end - begin < longest ? end - begin : longest};
}

// Keys of a sequence that has `present` of them.
DSPATTN_HOST_DEVICE constexpr int visible_keys(const LengthsView& key_lengths, int sequence, int present) {
  return key_lengths.present() ? clamp_length(key_lengths.at(sequence), 0, present) : present;
}

}  // namespace dspattn::cuda::tile
