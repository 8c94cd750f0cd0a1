// A warpgroup's scores of one tile: masked and pruned as the forward does it, bit for bit.
//
// The scores come from the same products (Q times 2^-e by K, 16 columns a step), the selection is the forward's
// (blocks/scores16.h, tile/select.h). Mask tensors are read from global memory: every lane reads its own keys.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/mask_pointers.h"
#include "cuda/blocks/mask_words.h"
#include "cuda/blocks/scores16.h"
#include "cuda/sm90/backward/shared.h"
#include "cuda/tile/kept_elements.h"

namespace dspattn::cuda::sm90::backward {

inline constexpr std::uint32_t kPrunedPair = 0xFC00FC00u;  // -inf: its weight is 0, whatever the row's log-sum-exp

// Whose scores: a thread's two rows, and the lane of its quad.
template <typename C>
struct ScoreRows {
  const BackwardParams& params;
  const Item& item;
  int head;
  int row;   // row g, within the sequence; row g + 8 is the other
  int part;  // tile of C::kTileK keys within the key block
  int t;     // lane of the quad

  // Calls visit(m, e, key) for every element of every group block of the lane: its key within the block, which may lie
  // past the end.
  template <typename Visit>
  __device__ __forceinline__ void for_each_key(Visit visit) const {
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) visit(i / 4, i % 4, params.keys.key(part, 4 * (i / 4) + t, i % 4));
  }

  __device__ __forceinline__ MaskPointers pointers(const MaskTensor& mask, int bytes) const {
    const struct { int rows, sequence, head; } whose{item.rows, item.sequence, head};
    return {mask, bytes, whose, row, item.block};
  }
  __device__ __forceinline__ int keys_left() const { return item.keys - item.block * tile::kBlockKeys; }

  __device__ __forceinline__ float bias_at(const std::uint8_t* at) const {
    if (params.bias_bytes == 4) return *reinterpret_cast<const float*>(at);
    const std::uint32_t bits = *reinterpret_cast<const std::uint16_t*>(at);
    if constexpr (C::kType == DType::bf16) return __uint_as_float(bits << 16);
    float value, other;
    ptx::unpack_f16x2(bits, value, other);
    return value;
  }

  // As blocks::pack_biased.
  __device__ __forceinline__ void pack_biased(PackedWords<C>& packed, const Scores<C>& scores) const {
    const MaskPointers at = pointers(params.bias, params.bias_bytes);
    const int left = keys_left();
    for_each_key([&](int m, int e, int key) {
      const int from = key < left ? key * at.key_bytes : 0;  // past the end: masked below
      const float bias0 = bias_at(at.row0 + from);
      const float bias1 = bias_at(at.row1 + from);
      const std::uint32_t masked = (bias0 == -INFINITY ? 0xFFFFu : 0u) | (bias1 == -INFINITY ? 0xFFFF0000u : 0u);
      const int k = score_index<C>(m, e);
      const float scale = params.scales.bias_scale;
      const std::uint32_t sum =
          ptx::pack_f16x2_clamped(fmaf(bias0, scale, scores[k]), fmaf(bias1, scale, scores[k + 2]));
      packed.words[4 * m + e] = ptx::bit_select(masked, kLowestPair, ptx::max_f16x2(sum, kLowestBiasedPair));
    });
  }

  __device__ __forceinline__ void mask_hidden(PackedWords<C>& packed) const {
    const MaskPointers at = pointers(params.allowed, 1);
    const int left = keys_left();
    for_each_key([&](int m, int e, int key) {
      const int from = key < left ? key * at.key_bytes : 0;
      const std::uint32_t seen = (at.row0[from] != 0 ? 0xFFFFu : 0u) | (at.row1[from] != 0 ? 0xFFFF0000u : 0u);
      std::uint32_t& word = packed.words[4 * m + e];
      word = ptx::bit_select(seen, word, kLowestPair);
    });
  }

  // All rows of the query tile that begins at `first` see all of the key block.
  __device__ __forceinline__ bool is_interior(int first) const {
    const tile::KeyBlockRange interior =
        tile::interior_key_blocks(item.band, first, min(first + C::kTileQ, item.rows) - 1);
    return item.block >= interior.begin && item.block < interior.end;
  }

  // Prunes: what is not kept becomes -inf, but masked keys (kMasked: there may be some) stay the lowest score.
  template <bool kMasked>
  __device__ __forceinline__ static void select(PackedWords<C>& packed) {
#pragma unroll
    for (int m = 0; m < C::kTileK / 16; ++m) {
      std::uint32_t* p = packed.words + 4 * m;
      const tile::KeptElements kept =
          tile::kept_elements(C::kSelection == Selection::two_of_four ? tile::keep_two_of_four(p[0], p[1], p[2], p[3])
                                                                      : tile::keep_one_of_two(p[0], p[1], p[2], p[3]));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const std::uint32_t stays = kMasked ? kept.mask[e] | ptx::equal_f16x2(p[e], kLowestPair) : kept.mask[e];
        p[e] = ptx::bit_select(stays, p[e], kPrunedPair);
      }
    }
  }

  // Scores as they are compared, masked and pruned. `first`: of the query tile.
  __device__ __forceinline__ void prune(PackedWords<C>& packed, const Scores<C>& scores, int first) const {
    if (params.bias.data != nullptr) {
      pack_biased(packed, scores);
    } else {
      pack_scores<C>(packed, scores);
    }
    if (params.allowed.data != nullptr) mask_hidden(packed);
    const bool interior = is_interior(first);
    if (!interior) {
      const int key = item.block * tile::kBlockKeys;
      mask_band<C>(packed,
                   PackedScores<C, Hidden::anything>{scores, params.keys, item.band.left, item.band.right, part, t,
                                                     row + item.band.diagonal - key, item.band.key_length - key});
    }
    if (interior && params.allowed.data == nullptr && params.bias.data == nullptr) {
      select<false>(packed);
    } else {
      select<true>(packed);
    }
  }
};

}  // namespace dspattn::cuda::sm90::backward
