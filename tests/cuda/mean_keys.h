// The keys whose mean takes the weight of a row's pruned keys, by the contract.
#pragma once

#include <utility>

#include "cuda/tile/means.h"

namespace dspattn::cuda::tile {

using Keys = std::pair<int, int>;  // [first, second)

// The whole blocks in the interval that a row sees, or the interval.
inline Keys mean_of(const RowBand& band, int row) {
  const KeyInterval keys = interval_of(band, row);
  int first = -1, last = -1;
  for (int begin = 0; begin + kBlockKeys <= keys.end; begin += kBlockKeys) {
    if (begin < keys.begin) continue;
    if (first < 0) first = begin;
    last = begin + kBlockKeys;
  }
  return first < 0 ? Keys{keys.begin, keys.end} : Keys{first, last};
}

}  // namespace dspattn::cuda::tile
