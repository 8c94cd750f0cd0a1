// The running softmax of a thread's two rows, rows g and g + 8 of its warp's 16. Logarithms are base 2.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/single.h"

namespace dspattn::cuda::blocks {

struct RowState {
  float sum0, sum1;      // of this thread's weights
  float minus0, minus1;  // minus the reference that weights are relative to; NaN: no visible key yet
  std::uint32_t minus;   // both in fp16, where exponentials are taken in fp16; NaN also where large
};

// What raising the references does: by how much everything accumulated so far must shrink. A row without a visible key
// yet takes 0 for this tile, and is told of in `unset`: forget_unset() then makes the next tile look again.
struct Raised {
  float shrink0, shrink1;
  bool unset0, unset1;
};

// To those of a tile, minus which are given; NaN: no visible key in the tile.
__device__ __forceinline__ Raised raise_references(float tile_minus0, float tile_minus1, RowState& state) {
  const auto raise = [](float of_tile, float& minus, float& shrink, bool& unset) {
    // fminf takes the number when the other is NaN: an unset reference, no key in this tile, or a NaN score, whose
    // weight shows it.
    const float raised = fminf(minus, of_tile);
    shrink = minus > raised ? ptx::exp2_fast(raised - minus) : 1.0f;
    unset = std::isnan(raised);
    minus = unset ? 0.0f : raised;
  };
  Raised result;
  raise(tile_minus0, state.minus0, result.shrink0, result.unset0);
  raise(tile_minus1, state.minus1, result.shrink1, result.unset1);
  return result;
}

__device__ __forceinline__ void forget_unset(const Raised& raised, RowState& state) {
  if (raised.unset0) {
    state.minus0 = NAN;
    state.minus |= 0xFFFFu;
  }
  if (raised.unset1) {
    state.minus1 = NAN;
    state.minus |= ~0xFFFFu;
  }
}

// What an item has accumulated, relative to the raised references.
template <int kOut>
__device__ __forceinline__ void shrink(const Raised& by, RowState& state, float (&out)[kOut]) {
  state.sum0 *= by.shrink0;
  state.sum1 *= by.shrink1;
#pragma unroll
  for (int i = 0; i < kOut; i += 4) {
    out[i] *= by.shrink0;
    out[i + 1] *= by.shrink0;
    out[i + 2] *= by.shrink1;
    out[i + 3] *= by.shrink1;
  }
}

// An item's rows before its first tile.
__device__ __forceinline__ RowState empty_rows() { return {0, 0, NAN, NAN, ~0u}; }

}  // namespace dspattn::cuda::blocks
