// Packed scores of a tile with mask tensors applied.
//
// The producer loads the tensor's block to shared memory (mask_load.h); every lane reads its own keys there.
#pragma once

#include <cstdint>

#include "cuda/blocks/masks.h"
#include "cuda/blocks/scores16.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/tile/mask_map.h"

namespace dspattn::cuda::blocks {

// The packed scores of a tile, masked already: element e of group block m is word 4m + e.
template <typename C>
struct PackedWords {
  std::uint32_t words[C::kTileK / 4];

  __device__ __forceinline__ std::uint32_t word(int m, int e) const { return words[4 * m + e]; }
};

// As the scores are.
template <typename C>
__device__ __forceinline__ void pack_scores(PackedWords<C>& packed, const Scores<C>& scores) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) packed.words[i] = PackedScores<C, Hidden::nothing>{scores}.word(i / 4, i % 4);
}

// Whose keys of a block: those of a lane in the tile `part` of the block.
struct MaskLane {
  int row;  // row g, counted in the block
  int t;    // lane of the quad
  int part;

  // Address of the first one in row g.
  template <tile::KeyMap kKeys>
  __device__ __forceinline__ std::uint32_t first(std::uint32_t block, int element_bytes) const {
    const int offset = tile::mask_offset(row, t * kKeys.group_step, element_bytes);
    return tile::mask_moved(block + static_cast<std::uint32_t>(offset), part * kKeys.part_step, element_bytes);
  }
};

// Row g + 8 lies this much further.
inline constexpr std::uint32_t kEightRows = 8 * 128;

// Masks the keys whose byte is zero. kKeys is the kernel's key map, a constant here, so that offsets in the block
// become offsets of loads.
template <typename C, tile::KeyMap kKeys>
__device__ __forceinline__ void mask_hidden(PackedWords<C>& packed, std::uint32_t block, const MaskLane& lane) {
  // Each half of `bytes` is made of its row's byte, twice.
  const auto apply = [&](int m, int e, std::uint32_t bytes) {
    std::uint32_t& word = packed.words[4 * m + e];
    word = ptx::bit_select(ptx::equal_f16x2(bytes, 0), kLowestPair, word);
  };
  const std::uint32_t first = lane.first<kKeys>(block, 1);
  constexpr int kRun = tile::mask_run(kKeys);
  if constexpr (kRun == 1) {
    // The lane's keys are single bytes, and its quad's four make a word: all four lanes read the words of 16 keys.
    const std::uint32_t own = 0x4400u + 0x1111u * static_cast<std::uint32_t>(lane.t);
#pragma unroll
    for (int i = 0; i < C::kTileK / 16; ++i) {
      const int m = 4 * (i % (C::kTileK / 64));
      const int e = i / (C::kTileK / 64);
      std::uint32_t words0[4], words1[4];
      const std::uint32_t at = tile::mask_moved(first & ~15u, kKeys.key(0, 4 * m, e), 1);
      ptx::load_shared_bytes<16>(at, words0);
      ptx::load_shared_bytes<16>(at + kEightRows, words1);
#pragma unroll
      for (int j = 0; j < 4; ++j) apply(m + j, e, ptx::permute_bytes(words0[j], words1[j], own));
    }
  } else {
#pragma unroll
    for (int i = 0; i < C::kTileK / 4 / kRun; ++i) {
      const int m = i / (4 / kRun);
      const int run = i % (4 / kRun);
      std::uint32_t bytes0[1], bytes1[1];
      const std::uint32_t at = tile::mask_moved(first, kKeys.key(0, 4 * m, run), 1);
      ptx::load_shared_bytes<kRun>(at, bytes0);
      ptx::load_shared_bytes<kRun>(at + kEightRows, bytes1);
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        apply(m, tile::mask_element(kKeys, run, j), ptx::permute_bytes(bytes0[0], bytes1[0], 0x4400u + 0x1111u * j));
      }
    }
  }
}

// With the bias added, in fp32 before the scores are rounded; -inf masks, whatever the score is, and no other bias
// does. `first` is the address of the lane's first key in row g.
template <typename C, tile::KeyMap kKeys, int kBytes>
__device__ __forceinline__ void pack_biased(PackedWords<C>& packed, const Scores<C>& scores, float scale,
                                            std::uint32_t first) {
  constexpr int kRun = tile::mask_run(kKeys);
#pragma unroll
  for (int i = 0; i < C::kTileK / 4 / kRun; ++i) {
    const int m = i / (4 / kRun);
    const int run = i % (4 / kRun);
    std::uint32_t bits0[(kRun * kBytes + 3) / 4], bits1[(kRun * kBytes + 3) / 4];
    const std::uint32_t at = tile::mask_moved(first, kKeys.key(0, 4 * m, run), kBytes);
    ptx::load_shared_bytes<kRun * kBytes>(at, bits0);
    ptx::load_shared_bytes<kRun * kBytes>(at + kEightRows, bits1);
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      float bias0, bias1;
      std::uint32_t masked;
      if constexpr (kBytes == 4) {
        bias0 = __uint_as_float(bits0[j]);
        bias1 = __uint_as_float(bits1[j]);
        masked = (bias0 == -INFINITY ? 0xFFFFu : 0u) | (bias1 == -INFINITY ? 0xFFFF0000u : 0u);
      } else {
        const std::uint32_t word0 = bits0[j / 2], word1 = bits1[j / 2];
        // A run of one is filled up with zeros: a sum does, on a pipe with room.
        const std::uint32_t pair =
            kRun == 1 ? (word1 << 16) + word0 : ptx::permute_bytes(word0, word1, j % 2 == 0 ? 0x5410u : 0x7632u);
        if constexpr (C::kType == DType::bf16) {
          bias0 = __uint_as_float(j % 2 == 0 ? word0 << 16 : word0 & 0xFFFF0000u);
          bias1 = __uint_as_float(j % 2 == 0 ? word1 << 16 : word1 & 0xFFFF0000u);
          masked = ptx::equal_bf16x2(pair, 0xFF80FF80u);
        } else {
          ptx::unpack_f16x2(pair, bias0, bias1);
          masked = ptx::equal_f16x2(pair, 0xFC00FC00u);
        }
      }
      const int e = tile::mask_element(kKeys, run, j);
      const int k = score_index<C>(m, e);
      const std::uint32_t sum =
          ptx::pack_f16x2_clamped(fmaf(bias0, scale, scores[k]), fmaf(bias1, scale, scores[k + 2]));
      packed.words[4 * m + e] = ptx::bit_select(masked, kLowestPair, ptx::max_f16x2(sum, kLowestBiasedPair));
    }
  }
}

template <typename C, tile::KeyMap kKeys>
__device__ __forceinline__ void pack_biased(PackedWords<C>& packed, const Scores<C>& scores, int bias_bytes,
                                            float scale, std::uint32_t block, const MaskLane& lane) {
  if (bias_bytes == 2) {
    pack_biased<C, kKeys, 2>(packed, scores, scale, lane.first<kKeys>(block, 2));
  } else {
    pack_biased<C, kKeys, 4>(packed, scores, scale, lane.first<kKeys>(block, 4));
  }
}

// Masks what the diagonal, the window and the key length hide.
template <typename C>
__device__ __forceinline__ void mask_band(PackedWords<C>& packed, const PackedScores<C, Hidden::anything>& band) {
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) {
    packed.words[i] = ptx::bit_select(band.seen(i / 4, i % 4), packed.words[i], kLowestPair);
  }
}

}  // namespace dspattn::cuda::blocks
