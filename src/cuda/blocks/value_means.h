// The mean of V that takes the weight of a row's pruned keys (rest = mean), from sums that the caller keeps.
#pragma once

#include <cstdint>

#include "cuda/blocks/values.h"
#include "cuda/tile/value_sums.h"

namespace dspattn::cuda::blocks {

// Columns [column, column + count), up to four, of the mean over what a row sees: `keys`. Called: a row's end is not
// where time goes, and its code would stand in every kernel twice. What the row does not see, be it NaN, reaches
// nothing: sums are never subtracted.
[[gnu::noinline]] inline __device__ float4 mean_of_values(const ValuesView& values, const SumsView& sums, int sequence,
                                                          int head, tile::KeyInterval keys, int column, int count) {
  const tile::MeanParts parts = tile::mean_parts(keys);
  float total[4] = {};
  float counted = 0;
  const float* row = sums.data + sums.offset(sequence, head, parts.first_row);
#pragma unroll 4
  for (int i = 0; i < parts.rows; ++i) {
    const float* own = row + 2 * i * sums.row_stride;
#pragma unroll
    for (int c = 0; c < 4; ++c) total[c] += c < count ? own[column + c] : 0.0f;
    counted += own[values.columns];
  }
  if (counted == 0) {
    const HeadValues of_head(values, sequence, head);
    for (const tile::KeyInterval& edge : {parts.before, parts.after}) {
#pragma unroll 4
      for (int key = edge.begin; key < edge.end; ++key) {
        const std::int64_t at = of_head.row(key);
        if (at < 0) continue;
#pragma unroll
        for (int c = 0; c < 4; ++c) total[c] += c < count ? of_head.at(at + column + c) : 0.0f;
        counted += 1;
      }
    }
  }
  const float share = counted == 0 ? 0.0f : 1 / counted;
  return make_float4(total[0] * share, total[1] * share, total[2] * share, total[3] * share);
}

}  // namespace dspattn::cuda::blocks
