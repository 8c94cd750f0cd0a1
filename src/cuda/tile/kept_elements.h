// Which elements of a group of four a selection keeps, as masks of two rows' packed values.
#pragma once

#include <cstdint>

#include "cuda/ptx/packed_half.h"
#include "cuda/tile/select.h"

namespace dspattn::cuda::tile {

// 0xFFFF in each half, a row, that keeps the element.
struct KeptElements {
  std::uint32_t mask[4];
};

// One instruction each.
DSPATTN_HOST_DEVICE inline KeptElements kept_elements(const Kept& kept) {
  using namespace ptx;
  constexpr int kUnless = 0xF1;  // x | ~y & ~z
  constexpr int kIf = 0xF2;      // x | ~y & z
  return {{lop3<kUnless>(kept.both_low, kept.both_high, kept.b_over_a),
           lop3<kIf>(kept.both_low, kept.both_high, kept.b_over_a),
           lop3<kUnless>(kept.both_high, kept.both_low, kept.d_over_c),
           lop3<kIf>(kept.both_high, kept.both_low, kept.d_over_c)}};
}

}  // namespace dspattn::cuda::tile
