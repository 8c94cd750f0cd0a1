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

// The first of the largest of four; no NaN among them.
DSPATTN_HOST_DEVICE inline KeptElements keep_one_of_four(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                                         std::uint32_t d) {
  using namespace ptx;
  constexpr int kNeither = 0x02;  // ~x & ~y & z
  const std::uint32_t top = max_f16x2(max_f16x2(a, b), max_f16x2(c, d));
  const std::uint32_t is_a = equal_f16x2(a, top), is_b = equal_f16x2(b, top) & ~is_a;
  const std::uint32_t is_c = lop3<kNeither>(is_a, is_b, equal_f16x2(c, top));
  return {{is_a, is_b, is_c, ~(is_a | is_b | is_c)}};
}

}  // namespace dspattn::cuda::tile
