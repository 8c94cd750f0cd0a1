// The scores of a warpgroup's 64 keys and a query tile: masked and pruned as the forward does it, bit for bit.
//
// The scores come from the same sums (Q times 2^-e by K, 16 columns a step; that it does not matter which of the two is
// the left operand is what this rests on), rounded as the forward's, and so is the selection. Mask tensors come as
// tile/key_row_masks.h says; a bias that cannot be copied so is read from global memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/blocks/scores16.h"
#include "cuda/ptx/mask_tiles.h"
#include "cuda/sm90/backward/products.h"
#include "cuda/tile/key_row_masks.h"
#include "cuda/tile/key_rows.h"

namespace dspattn::cuda::sm90::backward {

inline constexpr std::uint32_t kPrunedPair = 0xFC00FC00u;  // -inf: its weight is 0, whatever the row's log-sum-exp

// Packed scores: word 2j + i is key row g + 8i, queries 8j + 2t (low half) and the next.
template <typename C>
using PackedTile = std::uint32_t[C::kTileQ / 4];

inline constexpr std::uint32_t kBiasStepBytes = 16 * 32;  // of a warp's keys and 16 queries

// Of a bias that is copied ahead what a thread's packed scores ask for, in their order.
template <typename C>
struct BiasWords {
  PackedTile<C> words;
};
struct NoBiasWords {};
template <typename C>
using OwnBias = std::conditional_t<C::kBiasAhead, BiasWords<C>, NoBiasWords>;
template <typename C>
__device__ __forceinline__ void read_bias(PackedTile<C>& bias, std::uint32_t tile, int thread) {
  const int lane = thread & 31;
  const std::uint32_t own =
      tile + static_cast<std::uint32_t>(tile::bias_offset(thread >> 5, lane & 7, lane >> 3 & 1) + (lane >> 4) * 8 * 32);
#pragma unroll
  for (int step = 0; step < C::kTileQ / 16; ++step) {
    std::uint32_t words[4];
    ptx::load_transposed_matrices(own + static_cast<std::uint32_t>(step) * kBiasStepBytes, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[4 * step + i] = words[i];
  }
}

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
  int lane, warp;

  __device__ __forceinline__ KeyScores(const BackwardParams& p, const Item& own_item, const TileFacts& tile, int part,
                                       int thread)
      : params(p), item(own_item), facts(tile), lane(thread & 31), warp(thread >> 5) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const tile::Slot slot = tile::slot_of_key_row(warp * 16 + (lane >> 2) + 8 * i);
      key[i] = params.keys.key(item.part * C::kParts + part, slot.group, slot.element);
    }
  }

  __device__ __forceinline__ int block_key() const { return item.block * tile::kBlockKeys; }

  // From global memory; past the end of the keys it is that of the block's first key. Half of the elements are asked
  // for before the first is used.
  template <typename Element>
  __device__ __forceinline__ void pack_biased(PackedTile<C>& packed, const TileScores<C>& scores) const {
    const MaskTensor& bias = params.bias;
    const int row = facts.first + 2 * (lane & 3);
    const int left = item.keys - block_key();
    const Element* at[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at[i] = static_cast<const Element*>(bias.data) + item.sequence * bias.batch_stride +
              facts.head * bias.head_stride + row * bias.row_stride +
              (block_key() + (key[i] < left ? key[i] : 0)) * bias.key_stride;
    }
    constexpr int kBatch = C::kTileQ / 16;  // times two keys and two queries
#pragma unroll
    for (int first = 0; first < C::kTileQ / 8; first += kBatch) {
      Element values[kBatch][2][2];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          values[j][i][0] = row + 8 * (first + j) < item.rows ? *at[i] : Element{};
          values[j][i][1] = row + 8 * (first + j) + 1 < item.rows ? at[i][bias.row_stride] : Element{};
          at[i] += 8 * bias.row_stride;
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int word = 2 * (first + j) + i;
          float value[2];
          if constexpr (sizeof(Element) == 4) {
            value[0] = values[j][i][0];
            value[1] = values[j][i][1];
          } else {
            unpack_bias(values[j][i][0] | static_cast<std::uint32_t>(values[j][i][1]) << 16, value);
          }
          const std::uint32_t masked =
              (value[0] == -INFINITY ? 0xFFFFu : 0u) | (value[1] == -INFINITY ? 0xFFFF0000u : 0u);
          packed[word] = clamp_biased(masked, add_bias(scores, word, value, params.scales.bias_scale));
        }
      }
    }
  }

  // Two 16-bit elements.
  __device__ __forceinline__ static void unpack_bias(std::uint32_t pair, float (&value)[2]) {
    if constexpr (C::kType == DType::bf16) {
      value[0] = __uint_as_float(pair << 16);
      value[1] = __uint_as_float(pair & 0xFFFF0000u);
    } else {
      ptx::unpack_f16x2(pair, value[0], value[1]);
    }
  }
  // As blocks::pack_biased: in fp32, before the scores are rounded; -inf masks, and no other bias does.
  __device__ __forceinline__ static std::uint32_t add_bias(const TileScores<C>& scores, int word,
                                                           const float (&value)[2], float scale) {
    return ptx::pack_f16x2_clamped(fmaf(value[0], scale, scores[2 * word]),
                                   fmaf(value[1], scale, scores[2 * word + 1]));
  }
  __device__ __forceinline__ static std::uint32_t clamp_biased(std::uint32_t masked, std::uint32_t sum) {
    return ptx::bit_select(masked, kLowestPair, ptx::max_f16x2(sum, kLowestBiasedPair));
  }

  __device__ __forceinline__ static std::uint32_t is_minus_infinity(std::uint32_t bias) {
    return C::kType == DType::bf16 ? ptx::equal_bf16x2(bias, 0xFF80FF80u) : ptx::equal_f16x2(bias, 0xFC00FC00u);
  }

  // Copied ahead and read before. Sums that low are rare: whether they are masked is asked only where a warp has one.
  __device__ __forceinline__ static void pack_read_bias(PackedTile<C>& packed, const TileScores<C>& scores,
                                                        const PackedTile<C>& bias, float scale) {
    std::uint32_t lowest = 0;
#pragma unroll
    for (int word = 0; word < C::kTileQ / 4; ++word) {
      float value[2];
      unpack_bias(bias[word], value);
      packed[word] = add_bias(scores, word, value, scale);
      lowest = ptx::min_f16x2(lowest, packed[word]);
    }
    if (__all_sync(~0u, ptx::greater_f16x2(lowest, kLowestBiasedPair) == ~0u)) return;
#pragma unroll
    for (int word = 0; word < C::kTileQ / 4; ++word)
      packed[word] = clamp_biased(is_minus_infinity(bias[word]), packed[word]);
  }

  // `seen`: the thread's word of a boolean mask.
  __device__ __forceinline__ static void mask_hidden(PackedTile<C>& packed, std::uint32_t seen) {
#pragma unroll
    for (int j = 0; j < C::kTileQ / 8; ++j) {
      const std::uint32_t bits = seen << j;
      packed[2 * j] = ptx::bit_select(ptx::spread_signs<0x1100>(bits), packed[2 * j], kLowestPair);
      packed[2 * j + 1] = ptx::bit_select(ptx::spread_signs<0x3322>(bits), packed[2 * j + 1], kLowestPair);
    }
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
  __device__ __forceinline__ void pack(PackedTile<C>& packed, const TileScores<C>& scores, std::uint32_t seen) const {
    if (params.bias_bytes == 4) {
      pack_biased<float>(packed, scores);
    } else if (params.bias_bytes == 2) {
      pack_biased<std::uint16_t>(packed, scores);
    } else {
      pack_visible<C>(packed, scores);
    }
    hide(packed, seen);
  }
  // What masks other than a bias hide.
  __device__ __forceinline__ void hide(PackedTile<C>& packed, std::uint32_t seen) const {
    if (params.mask_words.data != nullptr) mask_hidden(packed, seen);
    if (facts.all_inside == 0) mask_band(packed);
  }
};

// ~0 in lanes with elements 2 and 3 of their groups, else 0.
__device__ __forceinline__ std::uint32_t upper_half(int thread) { return (thread & tile::kLanesApart) != 0 ? ~0u : 0u; }

// What the two lanes of a pair have of their groups. The answers to shuffles that stand behind products take as long as
// those take to issue: so all are asked for before.
template <typename C>
struct Halves {
  std::uint32_t upper;
  tile::HalfGroup own[C::kTileQ / 8], other[C::kTileQ / 8];

  __device__ __forceinline__ Halves(const PackedTile<C>& packed, int thread) : upper(upper_half(thread)) {
    if constexpr (C::kSelection == Selection::two_of_four) {
#pragma unroll
      for (int j = 0; j < C::kTileQ / 8; ++j) {
        own[j] = tile::half_group(packed[2 * j], packed[2 * j + 1], upper);
        other[j] = {__shfl_xor_sync(~0u, own[j].high, tile::kLanesApart),
                    __shfl_xor_sync(~0u, own[j].low, tile::kLanesApart)};
      }
    }
  }
};

// Prunes a lane's two keys, of two queries: what is not kept becomes -inf. kMasked: but masked keys stay the lowest
// score, for rows that are NaN and give that to what they see; both have a weight of 0 otherwise.
template <typename C, bool kMasked>
__device__ __forceinline__ void select_pair(std::uint32_t& a, std::uint32_t& b, const Halves<C>& halves, int j) {
  tile::KeptHalf kept;
  if constexpr (C::kSelection == Selection::two_of_four) {
    kept = tile::keep_two_of_four(a, b, halves.own[j], halves.other[j], halves.upper);
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

// Of so many pairs of queries.
template <typename C, bool kMasked, int kPairs = C::kTileQ / 8>
__device__ __forceinline__ void select(PackedTile<C>& packed, const Halves<C>& halves) {
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    select_pair<C, kMasked>(packed[2 * j], packed[2 * j + 1], halves, j);
  }
}

template <typename C>
__device__ __forceinline__ void prune(PackedTile<C>& packed, const Halves<C>& halves, bool masked) {
  if (masked) {
    select<C, true>(packed, halves);
  } else {
    select<C, false>(packed, halves);
  }
}

// What is pruned while the products run: some, or, where a row is NaN, all.
template <typename C>
__device__ __forceinline__ void prune_ahead(PackedTile<C>& packed, const Halves<C>& halves, bool has_nan,
                                            bool tells_masked) {
  if (has_nan) {
    prune<C>(packed, halves, tells_masked);
  } else if constexpr (C::kPrunedAhead > 0) {
    select<C, false, C::kPrunedAhead>(packed, halves);
  }
}

}  // namespace dspattn::cuda::sm90::backward
