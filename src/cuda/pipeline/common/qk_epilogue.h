// What happens to scores once they are computed: masks, selection, encoding, stores, all in the registers of the lane
// that holds them.
#pragma once

#include <cstdint>

#include "cuda/pipeline/common/qk_job.h"
#include "cuda/pipeline/common/select.h"

namespace dspattn::cuda::pipeline {

// What a lane keeps of 16 rows: for its rows g and g + 8 four words of nonzeros each, and one word of metadata.
struct LaneResult {
  std::uint32_t nonzeros[2][4];
  std::uint32_t metadata;
};

// A lane's scores of 16 rows as they are compared. 16-bit types: fp16, rows g and g + 8 side by side; key o is place
// offset o.
template <typename Element>
struct LaneKeys {
  std::uint32_t keys[16];

  __device__ __forceinline__ explicit LaneKeys(const float (&acc)[8][4], float scale) {
#pragma unroll
    for (int o = 0; o < 16; ++o) {
      keys[o] = ptx::pack_half2_clamped(acc[o / 2][o % 2] * scale, acc[o / 2][2 + o % 2] * scale);
    }
  }

  // visible: see visible_places.
  __device__ __forceinline__ void hide(std::uint32_t visible) {
#pragma unroll
    for (int o = 0; o < 16; ++o) {
      const std::uint32_t seen =
          ((visible >> o & 1u) ? 0x0000FFFFu : 0u) | ((visible >> (16 + o) & 1u) ? 0xFFFF0000u : 0u);
      keys[o] = choose_bits(seen, keys[o], kNegativeInfinityHalf2);
    }
  }

  __device__ __forceinline__ void prune(int group_log2, float value_scale, LaneResult& result) const {
    std::uint32_t first[4], second[4];
    if (group_log2 == 2) {
      result.metadata = keep_two_of_four(keys, first, second);
    } else {
      result.metadata = keep_one_of_two(keys, first, second);
    }
    if (value_scale == 1.0f) {  // a scale that is a power of two, as that of d = 64: a tenth of the instructions less
      store_as<1>(first, second, 1.0f, result);
    } else {
      store_as<0>(first, second, value_scale, result);
    }
  }

 private:
  // kUnscaled 1: value_scale is known to be 1.
  template <int kUnscaled>
  __device__ static __forceinline__ void store_as(const std::uint32_t (&first)[4], const std::uint32_t (&second)[4],
                                                  float value_scale, LaneResult& result) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const KeptPair kept = stored_scores<Element>(first[j], second[j], kUnscaled ? 1.0f : value_scale);
      result.nonzeros[0][j] = kept.row;
      result.nonzeros[1][j] = kept.row_below;
    }
  }
};

// fp32: compared as they are, in pairs.
template <>
struct LaneKeys<float> {
  float keys[4][4];

  __device__ __forceinline__ explicit LaneKeys(const float (&acc)[4][4], float) {
#pragma unroll
    for (int i = 0; i < 16; ++i) keys[i / 4][i % 4] = acc[i / 4][i % 4];
  }

  __device__ __forceinline__ void hide(std::uint32_t visible) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int r = i / 2 % 2, o = 2 * (i / 4) + i % 2;
      if (!(visible >> (8 * r + o) & 1u)) keys[i / 4][i % 4] = -INFINITY;
    }
  }

  __device__ __forceinline__ void prune(int, float value_scale, LaneResult& result) const {
    result.metadata = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 4, j = i % 4;
      const float even = keys[j][2 * r], odd = keys[j][2 * r + 1];
      result.nonzeros[r][j] = __float_as_uint(ptx::max_nan(even, odd) * value_scale);
      result.metadata |= (odd > even ? 0xEu : 0x4u) << (16 * r + 4 * j);
    }
  }
};

// Where a lane stores: its places of the matrix's row g, and its metadata of the matrix's first 32 rows.
struct LaneTarget {
  char* nonzeros;
  std::uint32_t* metadata;
  bool inside;  // these places are part of the matrix
};

template <typename Element, typename Job>
__device__ __forceinline__ LaneTarget lane_target(const QkPruneParams& p, const Job& job) {
  constexpr int kTile = Job::kPlaces;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, odd = t % 2;
  const std::int64_t place = static_cast<std::int64_t>(job.own_tile()) * kTile + t * (kTile / 4);
  const std::int64_t nonzero = (job.matrix * p.scores.rows + g) * (p.scores.places / 2) + place / 2;
  return {reinterpret_cast<char*>(static_cast<Element*>(p.scores.nonzeros) + nonzero),
          p.scores.metadata + job.matrix * p.scores.metadata_words +
              metadata_word(p.scores.rows, 0, odd, g, static_cast<std::int64_t>(job.own_tile()) * 4 + t - odd),
          place < p.scores.places};
}

// The nonzeros of rows row16 + g and row16 + g + 8, straight from the lanes.
template <typename Element>
__device__ __forceinline__ void store_nonzeros(const QkPruneParams& p, const LaneTarget& target, int row16,
                                               const LaneResult& result) {
  if (!target.inside) return;
  const int row_bytes = static_cast<int>(p.scores.places) * (static_cast<int>(sizeof(Element)) / 2);
  char* nonzeros = target.nonzeros + static_cast<std::int64_t>(row16) * row_bytes;
  ptx::store_16(nonzeros, result.nonzeros[0]);
  ptx::store_16(nonzeros + 8 * static_cast<std::int64_t>(row_bytes), result.nonzeros[1]);
}

// The metadata of both halves of 32 rows, after lanes t and t ^ 1 have traded words so that each stores 8 bytes.
__device__ __forceinline__ void store_metadata(const LaneTarget& target, int row32, const std::uint32_t (&words)[2]) {
  const bool odd = threadIdx.x % 2 != 0;
  const std::uint32_t received = __shfl_xor_sync(~0u, odd ? words[0] : words[1], 1);
  if (!target.inside) return;
  ptx::store_8(target.metadata + row32, odd ? received : words[0], odd ? words[1] : received);
}

// The part of a tile that this lane holds of 16 rows; computed from scratch.
template <typename Job>
__device__ __forceinline__ LaneTile lane_tile_of(const QkPruneParams& p, const Job& job, int row16, int own) {
  constexpr int kTile = Job::kPlaces;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return {job.batch(p), job.head(p), row16 + lane / 4, job.block_key(p, job.own_tile(own)),
          p.walk.place_in_block<kTile>(job.own_tile(own)) + lane % 4 * (kTile / 4)};
}

// Whether all of 32 rows see all keys of this thread's first `tiles` tiles, which are neighbours. `whole`: they all
// exist.
template <typename Job, QkMasks kMasks>
__device__ __forceinline__ bool sees_all(const QkPruneParams& p, int row32, bool whole, int tiles = 1) {
  if constexpr (kMasks == QkMasks::elements) return false;
  if (kMasks == QkMasks::none || !p.banded) return whole && row32 + kRowUnit <= static_cast<int>(p.walk.n_q);
  const Job job = same_job<Job>(p);
  const CommonKeys common = common_keys(p, row32, job.key_length(p));
  return job.keys(p, job.own_tile()).begin >= common.begin && job.keys(p, job.own_tile(tiles - 1)).end <= common.end;
}

// Which of the places of 16 rows that this lane holds of its tile `own` are visible; see visible_places.
template <typename Job, QkMasks kMasks>
__device__ __forceinline__ std::uint32_t visible_bits(const QkPruneParams& p, int row16, int own) {
  const Job job = same_job<Job>(p);
  const LaneTile tile = lane_tile_of(p, job, row16, own);
  if constexpr (kMasks == QkMasks::none) return existing_places<Job::kPlaces / 4>(p, tile);
  return visible_places<Job::kPlaces / 4>(p, tile, job.key_length(p));
}

// What follows the product of 16 rows by this thread's tile `own`: bias and masks where the tile has any, selection.
// visible() gives the visible_bits.
template <typename Element, typename Job, QkMasks kMasks, typename Visible>
__device__ __forceinline__ LaneResult prune_half(const QkPruneParams& p, int row16, int own, bool all_visible,
                                                 Visible visible, int group_log2, float value_scale,
                                                 float (&scores)[Job::kPlaces / 8][4]) {
  constexpr bool kScaled = std::is_same_v<Element, __nv_bfloat16>;  // see prepare_keys
  if constexpr (kMasks == QkMasks::elements) {
    if (p.mask.bias != nullptr) {
      add_bias<Job::kPlaces / 8>(p, lane_tile_of(p, same_job<Job>(p), row16, own),
                                 kScaled ? p.bias_scale * p.key_scale : p.bias_scale, scores);
    }
  }
  LaneKeys<Element> keys(scores, kScaled ? 1.0f : p.key_scale);
  if (!all_visible) keys.hide(visible());
  LaneResult result;
  keys.prune(group_log2, value_scale, result);
  return result;
}

// The same with its nonzeros stored; returns the metadata word.
template <typename Element, typename Job, QkMasks kMasks>
__device__ __forceinline__ std::uint32_t finish_half(const QkPruneParams& p, int row16, bool all_visible,
                                                     const LaneTarget& target, float (&scores)[Job::kPlaces / 8][4]) {
  const LaneResult result = prune_half<Element, Job, kMasks>(
      p, row16, 0, all_visible, [&] { return visible_bits<Job, kMasks>(p, row16, 0); }, p.group_log2, p.value_scale,
      scores);
  store_nonzeros<Element>(p, target, row16, result);
  return result.metadata;
}

}  // namespace dspattn::cuda::pipeline
