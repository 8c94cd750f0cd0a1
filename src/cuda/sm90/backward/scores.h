// The scores of a warpgroup's 64 keys and a query tile: masked and pruned as the forward does it, bit for bit.
//
// The scores come from the same sums (Q times 2^-e by K, 16 columns a step; that it does not matter which of the two is
// the left operand is what this rests on), rounded as the forward's, and so is the selection. Mask tensors are read
// from global memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/scores16.h"
#include "cuda/sm90/backward/products.h"
#include "cuda/tile/key_rows.h"

namespace dspattn::cuda::sm90::backward {

inline constexpr std::uint32_t kPrunedPair = 0xFC00FC00u;  // -inf: its weight is 0, whatever the row's log-sum-exp

// Packed scores: word 2j + i is key row g + 8i, queries 8j + 2t (low half) and the next.
template <typename C>
using PackedTile = std::uint32_t[C::kTileQ / 4];

// Scores as they are compared, where every query sees every key.
template <typename C>
__device__ __forceinline__ void pack_visible(PackedTile<C>& packed, const TileScores<C>& scores) {
#pragma unroll
  for (int i = 0; i < C::kTileQ / 4; ++i) packed[i] = ptx::pack_f16x2_clamped(scores[2 * i], scores[2 * i + 1]);
}

// Whose scores: a thread's two keys, and the queries of its quad's lane.
template <typename C>
struct KeyScores {
  const BackwardParams& params;
  const Item& item;
  const TileFacts& facts;
  int key[2];  // within the key block; may lie past the end
  int lane;

  __device__ __forceinline__ KeyScores(const BackwardParams& p, const Item& of, const TileFacts& tile, int part,
                                       int thread)
      : params(p), item(of), facts(tile), lane(thread & 31) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const tile::Slot slot = tile::slot_of_key_row((thread >> 5) * 16 + (lane >> 2) + 8 * i);
      key[i] = params.keys.key(item.part * C::kParts + part, slot.group, slot.element);
    }
  }

  __device__ __forceinline__ int block_key() const { return item.block * tile::kBlockKeys; }

  // Calls visit(word, at0, at1, present0, present1) for every word: where its key's elements of a mask tensor are for
  // its two queries, and whether there are such queries. Past the end of the keys that is the block's first key.
  template <typename Visit>
  __device__ __forceinline__ void for_each_pair(const MaskTensor& mask, int element_bytes, Visit visit) const {
    const int row = facts.first + 2 * (lane & 3);
    const int left = item.keys - block_key();
    const std::uint8_t* at[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at[i] = static_cast<const std::uint8_t*>(mask.data) +
              element_bytes * (item.sequence * mask.batch_stride + facts.head * mask.head_stride +
                               row * mask.row_stride + (block_key() + (key[i] < left ? key[i] : 0)) * mask.key_stride);
    }
    const std::int64_t next = element_bytes * mask.row_stride;
#pragma unroll
    for (int j = 0; j < C::kTileQ / 8; ++j) {
      const bool present0 = row + 8 * j < item.rows, present1 = row + 8 * j + 1 < item.rows;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        visit(2 * j + i, at[i], at[i] + next, present0, present1);
        at[i] += 8 * next;
      }
    }
  }

  __device__ __forceinline__ float bias_at(const std::uint8_t* at, bool present) const {
    if (!present) return 0;
    if (params.bias_bytes == 4) return *reinterpret_cast<const float*>(at);
    const std::uint32_t bits = *reinterpret_cast<const std::uint16_t*>(at);
    if constexpr (C::kType == DType::bf16) return __uint_as_float(bits << 16);
    float value, other;
    ptx::unpack_f16x2(bits, value, other);
    return value;
  }

  // As blocks::pack_biased.
  __device__ __forceinline__ void pack_biased(PackedTile<C>& packed, const TileScores<C>& scores) const {
    const float scale = params.scales.bias_scale;
    for_each_pair(params.bias, params.bias_bytes,
                  [&](int word, const std::uint8_t* at0, const std::uint8_t* at1, bool present0, bool present1) {
                    const float bias0 = bias_at(at0, present0);
                    const float bias1 = bias_at(at1, present1);
                    const std::uint32_t masked =
                        (bias0 == -INFINITY ? 0xFFFFu : 0u) | (bias1 == -INFINITY ? 0xFFFF0000u : 0u);
                    const std::uint32_t sum = ptx::pack_f16x2_clamped(fmaf(bias0, scale, scores[2 * word]),
                                                                      fmaf(bias1, scale, scores[2 * word + 1]));
                    packed[word] = ptx::bit_select(masked, kLowestPair, ptx::max_f16x2(sum, kLowestBiasedPair));
                  });
  }

  __device__ __forceinline__ void mask_hidden(PackedTile<C>& packed) const {
    for_each_pair(params.allowed, 1,
                  [&](int word, const std::uint8_t* at0, const std::uint8_t* at1, bool present0, bool present1) {
                    const std::uint32_t seen =
                        (present0 && *at0 != 0 ? 0xFFFFu : 0u) | (present1 && *at1 != 0 ? 0xFFFF0000u : 0u);
                    packed[word] = ptx::bit_select(seen, packed[word], kLowestPair);
                  });
  }

  // Masks what the diagonal, the window and the key length hide.
  __device__ __forceinline__ void mask_band(PackedTile<C>& packed) const {
    const auto seen_by = [&](int i) {
      return tile::QueryPairs::of(tile::queries_of_key(item.band, block_key() + key[i], facts.first));
    };
    const tile::QueryPairs seen[2] = {seen_by(0), seen_by(1)};
    const auto first = static_cast<float>(2 * (lane & 3));
    std::uint32_t rows = ptx::pack_f16x2(first, first + 1);
#pragma unroll
    for (int word = 0; word < C::kTileQ / 4; ++word) {
      packed[word] = ptx::bit_select(seen[word % 2].holds(rows), packed[word], kLowestPair);
      constexpr std::uint32_t kEightRows = 0x48004800u;  // 8 twice, in fp16
      if (word % 2 == 1) rows = ptx::add_f16x2(rows, kEightRows);
    }
  }

  // Scores as they are compared, where something may be masked.
  __device__ __forceinline__ void pack(PackedTile<C>& packed, const TileScores<C>& scores) const {
    if (params.bias.data != nullptr) {
      pack_biased(packed, scores);
    } else {
      pack_visible<C>(packed, scores);
    }
    if (params.allowed.data != nullptr) mask_hidden(packed);
    if (facts.all_inside == 0) mask_band(packed);
  }
};

// What the other lane of a pair has of its groups, for kPairs pairs of words from `first` on. The answers to shuffles
// that stand behind products take as long as those take to issue: so as many as registers allow are asked for before.
template <typename C, int kPairs>
struct OtherHalves {
  tile::HalfGroup halves[kPairs > 0 ? kPairs : 1];

  __device__ __forceinline__ OtherHalves(const PackedTile<C>& packed, int first) {
    if constexpr (C::kSelection == Selection::two_of_four) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const tile::HalfGroup own = tile::half_group(packed[2 * (first + j)], packed[2 * (first + j) + 1]);
        halves[j] = {__shfl_xor_sync(~0u, own.high, 4), __shfl_xor_sync(~0u, own.low, 4)};
      }
    }
  }
};
template <typename C>
using EarlyHalves = OtherHalves<C, C::kPairsAhead>;

// Prunes: what is not kept becomes -inf, but masked keys (kMasked: there may be some) stay the lowest score.
template <typename C, bool kMasked>
__device__ __forceinline__ void select(PackedTile<C>& packed, const EarlyHalves<C>& early, int thread) {
  const std::uint32_t upper = (thread & 4) != 0 ? ~0u : 0u;
  const OtherHalves<C, C::kTileQ / 8 - C::kPairsAhead> late(packed, C::kPairsAhead);
#pragma unroll
  for (int j = 0; j < C::kTileQ / 8; ++j) {
    std::uint32_t& a = packed[2 * j];
    std::uint32_t& b = packed[2 * j + 1];
    tile::KeptHalf kept;
    if constexpr (C::kSelection == Selection::two_of_four) {
      const tile::HalfGroup other = j < C::kPairsAhead ? early.halves[j] : late.halves[j - C::kPairsAhead];
      kept = tile::keep_two_of_four(a, b, tile::half_group(a, b), other, upper);
    } else {
      kept = tile::keep_one_of_two(a, b);
    }
    if constexpr (kMasked) {
      kept.first |= ptx::equal_f16x2(a, kLowestPair);
      kept.second |= ptx::equal_f16x2(b, kLowestPair);
    }
    a = ptx::bit_select(kept.first, a, kPrunedPair);
    b = ptx::bit_select(kept.second, b, kPrunedPair);
  }
}

template <typename C>
__device__ __forceinline__ void prune(PackedTile<C>& packed, const EarlyHalves<C>& early, bool masked, int thread) {
  if (masked) {
    select<C, true>(packed, early, thread);
  } else {
    select<C, false>(packed, early, thread);
  }
}

}  // namespace dspattn::cuda::sm90::backward
