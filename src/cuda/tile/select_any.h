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
  static constexpr Word kTaken = 0xFC00FC00u;  // -inf: scores are clamped, masked ones too
  DSPATTN_HOST_DEVICE static Word choose(std::uint32_t mask, Word a, Word b) { return ptx::bit_select(mask, a, b); }
};

// One row a word, fp32.
struct SingleKeys {
  using Word = float;
  DSPATTN_HOST_DEVICE static Word larger(Word a, Word b) { return ptx::max_nan(a, b); }
  DSPATTN_HOST_DEVICE static std::uint32_t equal(Word a, Word b) { return a == b ? ~0u : 0u; }
  static constexpr Word kTaken = -INFINITY;  // as masked scores are: to keep one of those changes nothing
  DSPATTN_HOST_DEVICE static Word choose(std::uint32_t mask, Word a, Word b) { return mask != 0 ? a : b; }
};

// The mask, per row, of a place that keep_largest() has taken; a NaN counts as taken.
template <typename Keys>
DSPATTN_HOST_DEVICE inline std::uint32_t is_kept(typename Keys::Word left) {
  return Keys::equal(left, Keys::kTaken) | ~Keys::equal(left, left);
}

// Takes the `keep` largest of each group of kGroup places: they become kTaken. t: lane of the quad; exchange(word, x):
// that word of lane t ^ x.
template <typename Keys, int kGroup, int kPlaces, typename Exchange>
DSPATTN_HOST_DEVICE inline void keep_largest(typename Keys::Word (&left)[kPlaces], int keep, int t, Exchange exchange) {
  constexpr int kLanes = kGroup > kPlaces ? kGroup / kPlaces : 1;  // that share a group
  constexpr int kOwn = kGroup / kLanes;                            // places of a group in one of them
#pragma unroll 1
  for (int round = 0; round < keep; ++round) {
#pragma unroll
    for (int first = 0; first < kPlaces; first += kOwn) {
      typename Keys::Word top = left[first];
#pragma unroll
      for (int i = 1; i < kOwn; ++i) top = Keys::larger(top, left[first + i]);
      std::uint32_t taken = 0;
      if constexpr (kLanes > 1) {  // the first place of the lowest lane
#pragma unroll
        for (int x = 1; x < kLanes; x *= 2) top = Keys::larger(top, exchange(top, x));
        std::uint32_t here = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) here |= Keys::equal(left[first + i], top);
#pragma unroll
        for (int x = 1; x < kLanes; ++x) {
          const std::uint32_t there = exchange(here, x);
          if ((t ^ x) < t) taken |= there;
        }
      }
#pragma unroll
      for (int i = first; i < first + kOwn; ++i) {
        const std::uint32_t take = Keys::equal(left[i], top) & ~taken;
        taken |= take;
        left[i] = Keys::choose(take, Keys::kTaken, left[i]);
      }
    }
  }
}

// The same for groups of 2^places_log2 places, 2 to 32.
template <typename Keys, int kPlaces, typename Exchange>
DSPATTN_HOST_DEVICE inline void keep_largest(typename Keys::Word (&left)[kPlaces], int keep, int places_log2, int t,
                                             Exchange exchange) {
  if (places_log2 == 1) return keep_largest<Keys, 2>(left, keep, t, exchange);
  if (places_log2 == 2) return keep_largest<Keys, 4>(left, keep, t, exchange);
  if (places_log2 == 3) return keep_largest<Keys, 8>(left, keep, t, exchange);
  if (places_log2 == 4) return keep_largest<Keys, 16>(left, keep, t, exchange);
  keep_largest<Keys, 32>(left, keep, t, exchange);
}

}  // namespace dspattn::cuda::tile
