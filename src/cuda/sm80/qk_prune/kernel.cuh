// qk_prune: S = scale * Q K^T pruned to 2:4 or 1:2 where it is computed. The dense scores live in registers only.
//
// A CTA takes up to 128 query rows of one (batch, head), 32 per warp, and walks over key tiles of 128 bytes of scores a
// row (64 keys of a 16-bit type, 32 of fp32). Q stays in registers (in shared memory for rows above 256 bytes); K tiles
// stream through a ring of cp.async stages, their rows permuted (tile_maps.h) so that each lane's accumulators are
// whole groups, and four groups in a row. The epilogue selects and encodes in registers; each lane then stores 16 bytes
// of nonzeros per row, each quad 64 bytes in a row, and after one shuffle each warp whole 128-byte lines of metadata.
//
// Requires: places of the matrix in whole metadata words, rows padded to 32, head dim <= kHeadDim.
#pragma once

#include <cstdint>

#include "cuda/ptx/sm80.h"
#include "cuda/sm80/copy.h"
#include "cuda/sm80/params.h"
#include "cuda/sm80/qk_prune/select.h"
#include "cuda/sm80/qk_prune/visibility.h"

namespace dspattn::cuda::sm80 {

inline constexpr int kQkMaxThreads = 128;

template <typename Element, int kHeadDim>
struct QkConfig {
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr int kRowBytes = kHeadDim * kElementBytes;
  static constexpr int kChunks = kRowBytes / kChunkBytes;
  static constexpr int kTile = tile_places(kElementBytes);
  static constexpr int kBlocks = kTile / 8;  // accumulator blocks of 8 columns
  static constexpr int kSteps = kRowBytes / kStepBytes;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kHalvesAtOnce = 2;  // 16-row halves of a warp that share a K fragment
  // Q of 32 rows takes kRowBytes / 4 registers; past 64 they would crowd out the accumulators.
  static constexpr bool kQInRegisters = kRowBytes <= 256;
  static constexpr int kStages = kRowBytes <= 256 ? 3 : 2;  // 2 keeps d = 256 inside the 99 KiB of sm_89
  // bf16 takes the power of two into Q exactly; fp16 could lose bits of small elements.
  static constexpr bool kScaleQ = std::is_same_v<Element, __nv_bfloat16>;
  static constexpr int kMinCtas = kHeadDim == 64 ? 3 : 2;  // the most without spills

  static int shared_bytes(int rows) { return rows * kRowBytes + kStages * kTileBytes; }
};

// What a CTA works on.
struct QkJob {
  int matrix, row0, row_block;
  int first_tile, end_tile;
  int key_length;

  // Not kept: they are needed rarely, and the registers are taken.
  __device__ __forceinline__ int batch(const QkPruneParams& p) const { return matrix / p.heads; }
  __device__ __forceinline__ int head(const QkPruneParams& p) const { return matrix % p.heads; }
};

template <int kTile>
__device__ __forceinline__ QkJob qk_job(const QkPruneParams& p) {
  QkJob job;
  const int rows_per_cta = static_cast<int>(blockDim.x);  // 32 lanes, 32 rows a warp
  const int tiles = p.row_tiles * p.key_splits;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  job.matrix = static_cast<int>(blockIdx.x) / tiles;
  job.row0 = tile / p.key_splits * rows_per_cta;
  job.row_block = job.row0 / p.walk.block;
  job.key_length = static_cast<int>(p.walk.key_length(job.batch(p)));
  const SlotRange slots = p.walk.slots(job.row_block, job.batch(p));
  const int per_split = (slots.end - slots.begin + p.key_splits - 1) / p.key_splits;
  const int first = slots.begin + (tile % p.key_splits) * per_split;
  const int end = min(first + per_split, slots.end);
  const int stored_tiles = static_cast<int>((p.scores.places + kTile - 1) / kTile);
  job.first_tile = first << p.walk.tiles_log2<kTile>();
  job.end_tile = min(end << p.walk.tiles_log2<kTile>(), stored_tiles);
  return job;
}

// Q and K tiles: rows of kRowBytes, swizzled.
template <int kRowBytes>
struct TileOffset {
  __device__ __forceinline__ int operator()(int row, int chunk) const { return swizzled_wide(row, chunk, kRowBytes); }
};

template <typename Element, int kHeadDim>
__device__ __forceinline__ void load_k_tile(const QkPruneParams& p, const QkJob& job, const Element* k, int tile,
                                            char* stage) {
  using Config = QkConfig<Element, kHeadDim>;
  const int slot = p.walk.slot_of_tile<Config::kTile>(tile);
  const int place0 = p.walk.place_in_block<Config::kTile>(tile);
  const int block_key = p.walk.key_block(job.row_block, slot) * p.walk.block;
  const int n_k = static_cast<int>(p.walk.n_k);
  copy_rows<Element, Config::kChunks>(
      stage, k, p.k, 0, Config::kTile, block_key + p.walk.block <= n_k ? p.k.advance : 0,
      [&](int column) {
        const int place = place0 + place_of_column(column, Config::kElementBytes);
        const int key = block_key + key_in_block(place, p.group_log2, p.interleaved);
        return key < n_k ? key : -1;
      },
      TileOffset<Config::kRowBytes>());
}

// Address of this lane's row for ldmatrix at step 0. Another step is an exclusive or with step * 32: the swizzle is one
// of the chunk index, and buffers are aligned to a whole row.
template <int kRowBytes>
__device__ __forceinline__ std::uint32_t lane_row_address(const char* tile, int row, int chunk) {
  return ptx::shared_address(tile + swizzled_wide(row, chunk, kRowBytes));
}

// Fragments of 16 rows by 32 bytes: lanes 0-15 address the rows' first 16 bytes, lanes 16-31 the second.
template <int kRowBytes>
__device__ __forceinline__ void load_q_fragment(std::uint32_t (&fragment)[4], const char* q, int row0, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t address = lane_row_address<kRowBytes>(q, row0 + lane % 16, lane / 16);
  ptx::ldmatrix_x4(fragment, address ^ static_cast<std::uint32_t>(step * kStepBytes));
}

// Multiplies the chunks of Q that this thread copied by a power of two; see round_rows_tf32.
template <int kRowBytes>
__device__ __forceinline__ void scale_rows_bf16(char* shared, int rows, float scale) {
  const __nv_bfloat162 factor = __float2bfloat162_rn(scale);
  ChunkWalk<kRowBytes / kChunkBytes>::each(rows, [&](int row, int chunk) {
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(shared + swizzled_wide(row, chunk, kRowBytes));
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __hmul2(pairs[i], factor);
  });
}

// acc = Q K^T of one K tile and kHalvesAtOnce of the warp's two 16-row halves, from `first_half` on.
template <typename Element, int kHeadDim, int kQSteps>
__device__ __forceinline__ void multiply(
    float (&acc)[QkConfig<Element, kHeadDim>::kHalvesAtOnce][QkConfig<Element, kHeadDim>::kBlocks][4],
    std::uint32_t (&q_registers)[2][kQSteps][4], int first_half, const char* q_shared, int warp_row, const char* k) {
  using Config = QkConfig<Element, kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t k_row = lane_row_address<Config::kRowBytes>(k, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < Config::kSteps; ++step) {
    const int q_step = Config::kQInRegisters ? step : 0;
    if constexpr (!Config::kQInRegisters) {
#pragma unroll
      for (int i = 0; i < Config::kHalvesAtOnce; ++i) {
        const int half = first_half + i;
        load_q_fragment<Config::kRowBytes>(q_registers[half][0], q_shared, warp_row + 16 * half, step);
      }
    }
#pragma unroll
    for (int pair = 0; pair < Config::kBlocks / 2; ++pair) {
      std::uint32_t fragment[4];  // blocks 2 * pair and 2 * pair + 1, both halves of the step
      ptx::ldmatrix_x4(fragment, (k_row ^ static_cast<std::uint32_t>(step * kStepBytes)) +
                                     static_cast<std::uint32_t>(16 * pair * Config::kRowBytes));
#pragma unroll
      for (int i = 0; i < Config::kHalvesAtOnce; ++i) {
        const std::uint32_t(&q)[4] = q_registers[first_half + i][q_step];
        if (step == 0) {
          ptx::mma_32_bytes_from_zero<Element>(acc[i][2 * pair], q, fragment[0], fragment[1]);
          ptx::mma_32_bytes_from_zero<Element>(acc[i][2 * pair + 1], q, fragment[2], fragment[3]);
        } else {
          ptx::mma_32_bytes<Element>(acc[i][2 * pair], q, fragment[0], fragment[1]);
          ptx::mma_32_bytes<Element>(acc[i][2 * pair + 1], q, fragment[2], fragment[3]);
        }
      }
    }
  }
}

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
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const KeptPair kept = stored_scores<Element>(first[j], second[j], value_scale);
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

// Where a lane stores: its first row of nonzeros and its metadata, of the matrix's first tile.
template <typename Element>
struct LaneTarget {
  Element* nonzeros;
  std::uint32_t* metadata;
};

template <typename Element, int kTile>
__device__ __forceinline__ LaneTarget<Element> lane_target(const QkPruneParams& p, const QkJob& job, int row32) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, odd = t % 2;
  const std::int64_t row = job.matrix * p.scores.rows + row32 + g;
  return {
      static_cast<Element*>(p.scores.nonzeros) + row * (p.scores.places / 2) + t * (kTile / 8),
      p.scores.metadata + job.matrix * p.scores.metadata_words + metadata_word(p.scores.rows, row32, odd, g, t - odd)};
}

// The nonzeros of a half, straight from the lanes.
template <typename Element, int kTile>
__device__ __forceinline__ void store_nonzeros(const QkPruneParams& p, const LaneTarget<Element>& target, int tile,
                                               int half, const LaneResult& result) {
  Element* nonzeros = target.nonzeros + tile * (kTile / 2) + 8 * half * p.scores.places;
#pragma unroll
  for (const auto& words : result.nonzeros) {
    ptx::store_16(nonzeros, words);
    nonzeros += 4 * p.scores.places;  // eight rows on
  }
}

// The metadata of both halves, after lanes t and t ^ 1 have traded words so that each stores 8 bytes.
template <typename Element>
__device__ __forceinline__ void store_metadata(const QkPruneParams& p, const LaneTarget<Element>& target, int tile,
                                               bool inside, const std::uint32_t (&words)[2]) {
  const bool odd = threadIdx.x % 2 != 0;
  const std::uint32_t received = __shfl_xor_sync(~0u, odd ? words[0] : words[1], 1);
  if (!inside) return;
  // Two word columns a tile.
  ptx::store_8(target.metadata + tile * 2 * p.scores.rows, odd ? received : words[0], odd ? words[1] : received);
}

// The part of a tile that this lane holds.
template <int kTile>
__device__ __forceinline__ LaneTile lane_tile_of(const QkPruneParams& p, const QkJob& job, int tile, int row16) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int block = p.walk.key_block(job.row_block, p.walk.slot_of_tile<kTile>(tile));
  return {job.batch(p), job.head(p), row16 + lane / 4, block * p.walk.block,
          p.walk.place_in_block<kTile>(tile) + lane % 4 * (kTile / 4)};
}

// Everything after the product of 16 rows: bias and masks where the tile has any, selection, stores. Returns the
// metadata word.
template <typename Element, int kHeadDim>
__device__ __forceinline__ std::uint32_t finish_half(const QkPruneParams& p, const QkJob& job, int tile, int row32,
                                                     int half, bool inside, const CommonKeys& common,
                                                     const LaneTarget<Element>& target,
                                                     float (&scores)[QkConfig<Element, kHeadDim>::kBlocks][4]) {
  using Config = QkConfig<Element, kHeadDim>;
  if (p.mask.bias != nullptr) {
    add_bias<Config::kBlocks>(p, lane_tile_of<Config::kTile>(p, job, tile, row32 + 16 * half),
                              Config::kScaleQ ? p.bias_scale * p.key_scale : p.bias_scale, scores);
  }
  LaneKeys<Element> keys(scores, Config::kScaleQ ? 1.0f : p.key_scale);
  const int block_key = p.walk.key_block(job.row_block, p.walk.slot_of_tile<Config::kTile>(tile)) * p.walk.block;
  const int first_key = p.interleaved ? block_key : block_key + p.walk.place_in_block<Config::kTile>(tile);
  const int end_key = first_key + (p.interleaved ? kInterleaveBlock : Config::kTile);
  if (first_key < common.begin || end_key > common.end) {
    const LaneTile lane_tile = lane_tile_of<Config::kTile>(p, job, tile, row32 + 16 * half);
    keys.hide(visible_places<Config::kTile / 4>(p, lane_tile, job.key_length));
  }
  LaneResult result;
  keys.prune(p.group_log2, p.value_scale, result);
  if (inside) store_nonzeros<Element, Config::kTile>(p, target, tile, half, result);
  return result.metadata;
}

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kQkMaxThreads, (QkConfig<Element, kHeadDim>::kMinCtas))
    qk_prune_kernel(const __grid_constant__ QkPruneParams p) {
  using Config = QkConfig<Element, kHeadDim>;
  extern __shared__ __align__(1024) char shared[];
  const QkJob job = qk_job<Config::kTile>(p);
  if (job.first_tile >= job.end_tile) return;
  const int rows = static_cast<int>(blockDim.x);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 32;
  char* sQ = shared;
  char* sK = shared + rows * Config::kRowBytes;
  const Element* gQ = matrix_of<Element>(p.q, job.batch(p), job.head(p));
  const Element* gK = matrix_of<Element>(p.k, job.batch(p), job.head(p) / p.heads_per_kv);
  const auto load = [&](int tile, int stage) {
    if (tile < job.end_tile) load_k_tile<Element, kHeadDim>(p, job, gK, tile, sK + stage * Config::kTileBytes);
    ptx::cp_async_commit();
  };

  const int n_q = static_cast<int>(p.walk.n_q);
  copy_rows<Element, Config::kChunks>(
      sQ, gQ, p.q, 0, rows, 0, [&](int row) { return job.row0 + row < n_q ? job.row0 + row : -1; },
      TileOffset<Config::kRowBytes>());
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) load(job.first_tile + s, s);

  std::uint32_t rQ[2][Config::kQInRegisters ? Config::kSteps : 1][4];
  ptx::cp_async_wait<Config::kStages - 2>();
  if constexpr (std::is_same_v<Element, float>) {
    round_rows_tf32<Config::kChunks>(sQ, rows, TileOffset<Config::kRowBytes>());
  }
  if constexpr (Config::kScaleQ) scale_rows_bf16<Config::kRowBytes>(sQ, rows, p.key_scale);
  __syncthreads();  // Q, copied with the first tile, is visible to all
  if constexpr (Config::kQInRegisters) {
#pragma unroll
    for (int i = 0; i < 2 * Config::kSteps; ++i) {
      load_q_fragment<Config::kRowBytes>(rQ[i % 2][i / 2], sQ, warp_row + 16 * (i % 2), i / 2);
    }
  }

  const int row32 = job.row0 + warp_row;
  const CommonKeys common = common_keys(p, row32, job.key_length);
  const LaneTarget<Element> target = lane_target<Element, Config::kTile>(p, job, row32);
  int stage = 0;
  for (int tile = job.first_tile; tile < job.end_tile; ++tile) {
    ptx::cp_async_wait<Config::kStages - 2>();
    if constexpr (std::is_same_v<Element, float>) {
      round_rows_tf32<Config::kChunks>(sK + stage * Config::kTileBytes, Config::kTile, TileOffset<Config::kRowBytes>());
    }
    __syncthreads();  // this tile's copies are visible to all; all have left the stage that is loaded next
    load(tile + Config::kStages - 1, stage == 0 ? Config::kStages - 1 : stage - 1);
    // Whether this lane's places and rows are part of the matrix.
    const int place = tile * Config::kTile + static_cast<int>(threadIdx.x) % 4 * (Config::kTile / 4);
    const bool inside = place < p.scores.places && row32 < p.scores.rows;
    std::uint32_t metadata[2];
#pragma unroll
    for (int first = 0; first < 2; first += Config::kHalvesAtOnce) {
      float rScores[Config::kHalvesAtOnce][Config::kBlocks][4];
      multiply<Element, kHeadDim>(rScores, rQ, first, sQ, warp_row, sK + stage * Config::kTileBytes);
#pragma unroll
      for (int i = 0; i < Config::kHalvesAtOnce; ++i) {
        metadata[first + i] =
            finish_half<Element, kHeadDim>(p, job, tile, row32, first + i, inside, common, target, rScores[i]);
      }
    }
    store_metadata(p, target, tile, inside, metadata);
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  ptx::cp_async_wait<0>();
}

}  // namespace dspattn::cuda::sm80
