// Selection of the N largest of M scores for any N and M: round by round the largest of what is left.
//
// A lane of a quad holds kPlaces places of a tile (key_tiles.h, `places`); a group has 2^places_log2 of them, in one
// lane or in neighbouring ones. Words are scores of one row (fp32), or of two rows packed (fp16, the contract's
// selection key). Ties keep the lower place, which is the lower key; a NaN is always kept, so that its row shows it.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/single.h"
#include "dspattn/pattern.h"

namespace dspattn::cuda::tile {

// Two rows a word, fp16.
struct PackedKeys {
  using Word = std::uint32_t;
  DSPATTN_HOST_DEVICE static Word larger(Word a, Word b) { return ptx::max_f16x2(a, b); }
  DSPATTN_HOST_DEVICE static std::uint32_t equal(Word a, Word b) { return ptx::equal_f16x2(a, b); }
  // What is left when a key is taken: -inf.
  DSPATTN_HOST_DEVICE static Word without(std::uint32_t taken, Word key) {
    return ptx::bit_select(taken, 0xFC00FC00u, key);
  }
};

// One row a word, fp32.
struct SingleKeys {
  using Word = float;
  DSPATTN_HOST_DEVICE static Word larger(Word a, Word b) { return ptx::max_nan(a, b); }
  DSPATTN_HOST_DEVICE static std::uint32_t equal(Word a, Word b) { return a == b ? ~0u : 0u; }
  DSPATTN_HOST_DEVICE static Word without(std::uint32_t taken, Word key) { return taken != 0 ? -INFINITY : key; }
};

// Masks, per row, of the places that are kept. t: lane of the quad; exchange(word, x): that word of lane t ^ x.
// `left` is overwritten.
template <typename Keys, int kPlaces, typename Exchange>
DSPATTN_HOST_DEVICE inline void keep_largest(typename Keys::Word (&left)[kPlaces], std::uint32_t (&kept)[kPlaces],
                                             int keep, int places_log2, int t, Exchange exchange) {
  constexpr int kPlacesLog2 = kPlaces == 16 ? 4 : 3;
  static_assert(kPlaces == 1 << kPlacesLog2);
  const int lanes = places_log2 > kPlacesLog2 ? 1 << (places_log2 - kPlacesLog2) : 1;
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) kept[i] = ~Keys::equal(left[i], left[i]);
#pragma unroll 1
  for (int round = 0; round < keep; ++round) {
    // The largest of its group, at every place.
    typename Keys::Word top[kPlaces];
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) top[i] = left[i];
#pragma unroll
    for (int level = 0; level < kPlacesLog2; ++level) {
      if (places_log2 > level) {
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
          if ((i >> level & 1) != 0) continue;
          const int other = i | 1 << level;
          top[i] = top[other] = Keys::larger(top[i], top[other]);
        }
      }
    }
    // The first place that has it; of a group in several lanes, that of the lowest lane.
    std::uint32_t taken = 0;
    if (lanes > 1) {
      for (int x = 1; x < lanes; x *= 2) top[0] = Keys::larger(top[0], exchange(top[0], x));
      std::uint32_t here = 0;
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        top[i] = top[0];
        here |= Keys::equal(left[i], top[0]);
      }
      for (int x = 1; x < lanes; ++x) {
        const std::uint32_t there = exchange(here, x);
        if ((t ^ x) < t) taken |= there;
      }
    }
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if (lanes == 1 && (i & ((1 << places_log2) - 1)) == 0) taken = 0;
      const std::uint32_t take = Keys::equal(left[i], top[i]) & ~taken;
      taken |= take;
      kept[i] |= take;
      left[i] = Keys::without(take, left[i]);
    }
  }
}

}  // namespace dspattn::cuda::tile
