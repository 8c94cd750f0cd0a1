// Which scores of 32 x 32 a warp keeps where nothing but a pattern, a diagonal, a window and lengths is asked for
// (Features::plain): rounded to fp16, the contract's selection key, two rows a word. Sixteen words of a lane, of which
// kPlaces after kPlaces are places of the same two rows (tile/key_tiles.h).
#pragma once

#include <cstdint>

#include "cuda/blocks/scores16.h"
#include "cuda/general/backward/params.h"
#include "cuda/general/masks.h"
#include "cuda/tile/kept_elements.h"
#include "cuda/tile/select_any.h"

namespace dspattn::cuda::general::backward {

inline constexpr std::uint32_t kNoScores = 0xFC00FC00u;  // -inf twice: weights of 0, whatever the row's LSE

template <int kPlaces>
struct PackedChoice {
  static constexpr int kWords = 16;
  std::uint32_t words[kWords], kept[kWords];

  __device__ __forceinline__ void put(int i, float low, float high) {
    words[i] = ptx::pack_f16x2_clamped(low, high);
    kept[i] = ~0u;
  }
  // -inf where pruned or masked.
  __device__ __forceinline__ void get(int i, float& low, float& high) const {
    ptx::unpack_f16x2(ptx::bit_select(kept[i], words[i], kNoScores), low, high);
  }

  // Groups of two and of four lie in a lane, larger ones in several. exchange(word, x) and exchange.own(): as
  // keep_largest() of tile/select_any.h has it, a word of lane t ^ x, and t.
  template <typename Exchange>
  __device__ __forceinline__ void choose(const BackwardParams& params, Exchange exchange) {
    if (params.keep == 0) return;
    const int groups = params.tiles.places_log2;
    if (groups == 2 && params.keep == 2) {
      choose_fours([](auto... four) { return tile::keep_two_of_four(four...); });
    } else if (groups == 1) {
      choose_fours([](auto... four) { return tile::keep_one_of_two(four...); });
    } else {
      choose_largest(params.keep, groups, exchange);
    }
  }
  __device__ __forceinline__ void drop_masked() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) kept[i] &= ~ptx::equal_f16x2(words[i], blocks::kLowestPair);
  }

 private:
  template <typename Keep>
  __device__ __forceinline__ void choose_fours(Keep keep) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const tile::KeptElements elements = tile::kept_elements(keep(words[i], words[i + 1], words[i + 2], words[i + 3]));
#pragma unroll
      for (int e = 0; e < 4; ++e) kept[i + e] = elements.mask[e];
    }
  }
  // Groups that lanes share, row by row: unrolled it would be long code that few ask for.
  template <typename Exchange>
  __device__ __forceinline__ void choose_largest(int keep, int groups, Exchange exchange) {
    const int t = exchange.own();
    if (groups == 2) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) kept[i] = words[i];
      tile::keep_largest<tile::PackedKeys, 4>(kept, keep, t, exchange);
#pragma unroll
      for (int i = 0; i < kWords; ++i) kept[i] = tile::is_kept<tile::PackedKeys>(kept[i]);
      return;
    }
#pragma unroll 1
    for (int first = 0; first < kWords; first += kPlaces) {
      std::uint32_t left[kPlaces];
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) left[i] = words[i];
      if (groups == 3) {
        tile::keep_largest<tile::PackedKeys, 8>(left, keep, t, exchange);
      } else if (groups == 4) {
        tile::keep_largest<tile::PackedKeys, 16>(left, keep, t, exchange);
      } else {
        tile::keep_largest<tile::PackedKeys, 32>(left, keep, t, exchange);
      }
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) kept[i] = tile::is_kept<tile::PackedKeys>(left[i]);
      go_round<kPlaces>(words);
      go_round<kPlaces>(kept);
    }
  }
};

}  // namespace dspattn::cuda::general::backward
