// Selection of two of four keys, or one of each two, on scores packed two rows to a word, and the sparsity metadata
// that tells the tensor core which were kept (PTX ISA, "Sparse matrix storage" of wgmma.sp).
//
// A word holds a score of row g (low half) and of row g + 8 (high half), rounded to fp16: the contract's selection key.
// NaN travels to a kept value, so that the row's sum shows it; masked keys are -inf. Ties keep the lower element.
#pragma once

#include <cstdint>

#include "cuda/ptx/packed_half.h"
#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

// What was kept of one group, for two rows: the values in ascending element order, and 16-bit masks per row.
struct Kept {
  std::uint32_t first;
  std::uint32_t second;
  std::uint32_t b_over_a;   // element 1 beats element 0
  std::uint32_t d_over_c;   // element 3 beats element 2
  std::uint32_t both_low;   // elements 0 and 1 are kept    (2:4 only)
  std::uint32_t both_high;  // elements 2 and 3 are kept    (2:4 only)
};

// The two largest of a, b, c, d.
DSPATTN_HOST_DEVICE inline Kept keep_two_of_four(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  using namespace ptx;
  const std::uint32_t high1 = max_f16x2(a, b);
  const std::uint32_t low1 = min_f16x2(a, b);
  const std::uint32_t high2 = max_f16x2(c, d);
  const std::uint32_t low2 = min_f16x2(c, d);
  Kept kept;
  kept.both_low = greater_equal_f16x2(low1, high2);
  kept.both_high = greater_f16x2(low2, high1);
  kept.b_over_a = greater_f16x2(b, a);
  kept.d_over_c = greater_f16x2(d, c);
  kept.first = bit_select(kept.both_low, a, bit_select(kept.both_high, c, high1));
  kept.second = bit_select(kept.both_low, b, bit_select(kept.both_high, d, high2));
  return kept;
}

// The larger of a, b and the larger of c, d.
DSPATTN_HOST_DEVICE inline Kept keep_one_of_two(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  using namespace ptx;
  return {max_f16x2(a, b), max_f16x2(c, d), greater_f16x2(b, a), greater_f16x2(d, c), 0, 0};
}

// What was not kept, in any order: only its weight is asked for.
struct LeftOut {
  std::uint32_t first;
  std::uint32_t second;
};

// The two smallest of a, b, c, d: of the larger pair its smaller one loses against nothing else than the other pair's
// larger one.
DSPATTN_HOST_DEVICE inline LeftOut left_out_of_four(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                                    std::uint32_t d) {
  using namespace ptx;
  return {min_f16x2(min_f16x2(a, b), max_f16x2(c, d)), min_f16x2(min_f16x2(c, d), max_f16x2(a, b))};
}

// The smaller of a, b and the smaller of c, d.
DSPATTN_HOST_DEVICE inline LeftOut left_out_of_two(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  return {ptx::min_f16x2(a, b), ptx::min_f16x2(c, d)};
}

// Nibble i of each half from the i-th of four masks.
DSPATTN_HOST_DEVICE inline std::uint32_t merge_nibbles(std::uint32_t m0, std::uint32_t m1, std::uint32_t m2,
                                                       std::uint32_t m3) {
  using namespace ptx;
  return bit_select(0x00FF00FFu, bit_select(0x000F000Fu, m0, m1), bit_select(0x0F000F00u, m2, m3));
}

// The masks of two groups side by side: nibbles 0 and 1 of each half (kFirst = 0), or 2 and 3 (kFirst = 2).
struct KeptPair {
  std::uint32_t b_over_a;
  std::uint32_t d_over_c;
  std::uint32_t both_low;
  std::uint32_t both_high;
};
template <int kFirst>
DSPATTN_HOST_DEVICE inline KeptPair pair_kept(const Kept& even, const Kept& odd) {
  constexpr std::uint32_t kEven = kFirst == 0 ? 0x000F000Fu : 0x0F000F00u;
  return {ptx::bit_select(kEven, even.b_over_a, odd.b_over_a), ptx::bit_select(kEven, even.d_over_c, odd.d_over_c),
          ptx::bit_select(kEven, even.both_low, odd.both_low), ptx::bit_select(kEven, even.both_high, odd.both_high)};
}

// Metadata of four groups of a lane, given as two pairs: nibble i of the low (high) half says which two elements of
// group i row g (g + 8) keeps, as index0 | index1 << 2 with index0 < index1.
DSPATTN_HOST_DEVICE inline std::uint32_t metadata_two_of_four(const KeptPair& first, const KeptPair& second) {
  using namespace ptx;
  constexpr std::uint32_t kFirst = 0x00FF00FFu;
  const std::uint32_t low = bit_select(kFirst, first.both_low, second.both_low);
  const std::uint32_t high = bit_select(kFirst, first.both_high, second.both_high);
  const std::uint32_t b = bit_select(kFirst, first.b_over_a, second.b_over_a);
  const std::uint32_t d = bit_select(kFirst, first.d_over_c, second.d_over_c);
  const std::uint32_t bit0 = lop3<0x10>(b, low, high);  // b & ~low & ~high
  const std::uint32_t bit2 = lop3<0xFE>(d, low, high);  // d | low | high
  const std::uint32_t even_bits = bit_select(0x11111111u, bit0, bit2);
  const std::uint32_t odd_bits = lop3<0xC5>(0x22222222u, high, low);  // bit 1: high, bit 3: ~low
  return bit_select(0x55555555u, even_bits, odd_bits);
}

DSPATTN_HOST_DEVICE inline std::uint32_t metadata_one_of_two(const KeptPair& first, const KeptPair& second) {
  using namespace ptx;
  const std::uint32_t b = bit_select(0x00FF00FFu, first.b_over_a, second.b_over_a);
  const std::uint32_t d = bit_select(0x00FF00FFu, first.d_over_c, second.d_over_c);
  return lop3<0xEA>(bit_select(0x11111111u, b, d), 0x55555555u, 0x88888888u);
}

// Where all groups keep the keys of the block's lower half: elements 0 and 1, or 0 and 2 (1:2).
inline constexpr std::uint32_t kLowerTwoOfFour = 0x44444444u;
inline constexpr std::uint32_t kLowerOneOfTwo = 0x88888888u;

// The four lanes of a quad hold one such word each: lane t's nibble i is group 4i + t of 64 keys. The tensor core wants
// the 16 keys of groups 4i..4i+3 in lane i: a 4 x 4 transpose of nibbles in each half, in two exchanges over the quad.
struct QuadTranspose {
  std::uint32_t rotation;  // bits to rotate the neighbour's word
  std::uint32_t own;       // nibbles that stay
  std::uint32_t selector;  // bytes to take from the lane two away

  // Computed without selects: predicates are scarce where this is used.
  DSPATTN_HOST_DEVICE static constexpr QuadTranspose of_lane(int t) {
    const std::uint32_t odd = static_cast<std::uint32_t>(t & 1);
    const std::uint32_t upper = static_cast<std::uint32_t>(t >> 1);
    return {4 + 24 * odd, 0x0F0F0F0Fu << (4 * odd), 0x6240u - upper * (0x6240u - 0x3715u)};
  }

  // `neighbour` is the word of lane t ^ 1.
  DSPATTN_HOST_DEVICE std::uint32_t exchange_pairs(std::uint32_t word, std::uint32_t neighbour) const {
    return ptx::bit_select(own, word, ptx::rotate_left(neighbour, rotation));
  }
  // Both words after exchange_pairs; `across` is that of lane t ^ 2.
  DSPATTN_HOST_DEVICE std::uint32_t exchange_halves(std::uint32_t word, std::uint32_t across) const {
    return ptx::permute_bytes(word, across, selector);
  }
};

}  // namespace dspattn::cuda::tile
