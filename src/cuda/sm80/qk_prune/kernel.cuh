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
  static constexpr int kTile = tile_places(kElementBytes);
  static constexpr int kBlocks = kTile / 8;  // accumulator blocks of 8 columns
  static constexpr int kSteps = kRowBytes / kStepBytes;
  static constexpr int kTileBytes = kTile * kRowBytes;
  // Q of 32 rows takes kRowBytes / 4 registers; past 64 they would crowd out the accumulators.
  static constexpr bool kQInRegisters = kRowBytes <= 256;
  static constexpr int kStages = kRowBytes <= 256 ? 3 : 2;  // 2 keeps d = 256 inside the 99 KiB of sm_89
  // bf16 can take the power of two into Q exactly; fp16 could lose bits of small elements.
  static constexpr bool kScaleQ = std::is_same_v<Element, __nv_bfloat16> && kQInRegisters;
  static constexpr int kMinCtas = kScaleQ && kRowBytes <= 128 ? 3 : 2;  // the most that compile without spills

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

template <typename Element, int kHeadDim>
__device__ __forceinline__ void load_k_tile(const QkPruneParams& p, const QkJob& job, const Element* k, int tile,
                                            char* stage) {
  using Config = QkConfig<Element, kHeadDim>;
  const int slot = p.walk.slot_of_tile<Config::kTile>(tile);
  const int place0 = p.walk.place_in_block<Config::kTile>(tile);
  const int block_key = p.walk.key_block(job.row_block, slot) * p.walk.block;
  copy_rows<Element, Config::kRowBytes>(stage, k, p.k, Config::kTile, [&](int column) -> std::int64_t {
    const int place = place0 + place_of_column(column, Config::kElementBytes);
    const int key = block_key + key_in_block(place, p.group_log2, p.interleaved);
    return key < p.walk.n_k ? key : -1;
  });
}

// Fragments of 16 rows by 32 bytes: lanes 0-15 address the rows' first 16 bytes, lanes 16-31 the second.
template <int kRowBytes>
__device__ __forceinline__ void load_q_fragment(std::uint32_t (&fragment)[4], const char* q, int row0, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ptx::ldmatrix_x4(fragment, ptx::shared_address(q + swizzled_wide(row0 + lane % 16, 2 * step + lane / 16, kRowBytes)));
}

template <typename Element>
__device__ __forceinline__ void scale_fragment(std::uint32_t (&fragment)[4], float scale) {
  const __nv_bfloat162 factor = __float2bfloat162_rn(scale);
#pragma unroll
  for (std::uint32_t& word : fragment) {
    const __nv_bfloat162 scaled = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&word), factor);
    word = *reinterpret_cast<const std::uint32_t*>(&scaled);
  }
}

// acc += Q K^T of the warp's 32 rows and one K tile.
template <typename Element, int kHeadDim, int kQSteps>
__device__ __forceinline__ void multiply(float (&acc)[2][QkConfig<Element, kHeadDim>::kBlocks][4],
                                         std::uint32_t (&q_registers)[2][kQSteps][4], const char* q_shared,
                                         int warp_row, const char* k) {
  using Config = QkConfig<Element, kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int step = 0; step < Config::kSteps; ++step) {
    const int q_step = Config::kQInRegisters ? step : 0;
    if constexpr (!Config::kQInRegisters) {
      load_q_fragment<Config::kRowBytes>(q_registers[0][0], q_shared, warp_row, step);
      load_q_fragment<Config::kRowBytes>(q_registers[1][0], q_shared, warp_row + 16, step);
    }
#pragma unroll
    for (int pair = 0; pair < Config::kBlocks / 2; ++pair) {
      std::uint32_t fragment[4];  // blocks 2 * pair and 2 * pair + 1, both halves of the step
      const int column = 16 * pair + lane / 16 * 8 + lane % 8;
      ptx::ldmatrix_x4(fragment,
                       ptx::shared_address(k + swizzled_wide(column, 2 * step + lane / 8 % 2, Config::kRowBytes)));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        ptx::mma_32_bytes<Element>(acc[h][2 * pair], q_registers[h][q_step], fragment[0], fragment[1]);
        ptx::mma_32_bytes<Element>(acc[h][2 * pair + 1], q_registers[h][q_step], fragment[2], fragment[3]);
      }
    }
  }
}

// What a lane stores of a tile: per 16-row half h and row r (g, g + 8) four words of nonzeros, per half one of
// metadata.
struct LaneResult {
  std::uint32_t nonzeros[2][2][4];
  std::uint32_t metadata[2];
};

// A lane's scores as they are compared. 16-bit types: fp16, rows g and g + 8 side by side; key o is place offset o.
template <typename Element>
struct LaneKeys {
  std::uint32_t keys[2][16];

  __device__ __forceinline__ explicit LaneKeys(const float (&acc)[2][8][4], float scale) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float(&block)[4] = acc[i / 16][i % 16 / 2];
      keys[i / 16][i % 16] = ptx::pack_half2_clamped(block[i % 2] * scale, block[2 + i % 2] * scale);
    }
  }

  // visible: see visible_places.
  __device__ __forceinline__ void hide(std::uint64_t visible) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int h = i / 16, o = i % 16;
      const std::uint32_t rows = static_cast<std::uint32_t>(visible >> (32 * h));
      const std::uint32_t seen = ((rows >> o & 1u) ? 0x0000FFFFu : 0u) | ((rows >> (16 + o) & 1u) ? 0xFFFF0000u : 0u);
      keys[h][o] = choose_bits(seen, keys[h][o], kNegativeInfinityHalf2);
    }
  }

  __device__ __forceinline__ void prune(int group_log2, float value_scale, LaneResult& result) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      std::uint32_t first[4], second[4];
      if (group_log2 == 2) {
        result.metadata[h] = keep_two_of_four(keys[h], first, second);
      } else {
        result.metadata[h] = keep_one_of_two(keys[h], first, second);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const KeptPair kept = stored_scores<Element>(first[j], second[j], value_scale);
        result.nonzeros[h][0][j] = kept.row;
        result.nonzeros[h][1][j] = kept.row_below;
      }
    }
  }
};

// fp32: compared as they are, in pairs.
template <>
struct LaneKeys<float> {
  float keys[2][4][4];

  __device__ __forceinline__ explicit LaneKeys(const float (&acc)[2][4][4], float) {
#pragma unroll
    for (int i = 0; i < 32; ++i) keys[i / 16][i / 4 % 4][i % 4] = acc[i / 16][i / 4 % 4][i % 4];
  }

  __device__ __forceinline__ void hide(std::uint64_t visible) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int h = i / 16, r = i / 2 % 2, o = 2 * (i / 4 % 4) + i % 2;
      if (!(visible >> (8 * (2 * h + r) + o) & 1u)) keys[h][i / 4 % 4][i % 4] = -INFINITY;
    }
  }

  __device__ __forceinline__ void prune(int, float value_scale, LaneResult& result) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      result.metadata[h] = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int r = i / 4, j = i % 4;
        const float even = keys[h][j][2 * r], odd = keys[h][j][2 * r + 1];
        result.nonzeros[h][r][j] = __float_as_uint(ptx::max_nan(even, odd) * value_scale);
        result.metadata[h] |= (odd > even ? 0xEu : 0x4u) << (16 * r + 4 * j);
      }
    }
  }
};

// Nonzeros straight from the lanes; metadata after lanes t and t ^ 1 have traded words, so that each stores 8 bytes.
template <typename Element, int kTile>
__device__ __forceinline__ void store(const QkPruneParams& p, const QkJob& job, int tile, int row32,
                                      const LaneResult& result) {
  constexpr int kElementBytes = sizeof(Element);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const bool odd = t % 2 != 0;
  const std::uint32_t received = __shfl_xor_sync(~0u, odd ? result.metadata[0] : result.metadata[1], 1);
  const int place = tile * kTile + t * (kTile / 4);
  if (place >= p.scores.places || row32 >= p.scores.rows) return;

  const std::int64_t row_elements = p.scores.places / 2;
  Element* nonzeros = static_cast<Element*>(p.scores.nonzeros) + job.matrix * p.scores.rows * row_elements + place / 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t(&words)[4] = result.nonzeros[i / 2][i % 2];
    *reinterpret_cast<uint4*>(nonzeros + (row32 + 8 * i + g) * row_elements) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
  const int block = place / (places_per_word_column(kElementBytes) / 2);
  const std::int64_t word = metadata_word(p.scores.rows, row32, odd ? 1 : 0, g, block - (odd ? 1 : 0));
  const uint2 words = odd ? make_uint2(received, result.metadata[1]) : make_uint2(result.metadata[0], received);
  *reinterpret_cast<uint2*>(p.scores.metadata + job.matrix * p.scores.metadata_words + word) = words;
}

// The part of a tile that this lane holds.
template <int kTile>
__device__ __forceinline__ LaneTile lane_tile_of(const QkPruneParams& p, const QkJob& job, int tile, int row32) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int block = p.walk.key_block(job.row_block, p.walk.slot_of_tile<kTile>(tile));
  return {job.batch(p), job.head(p), row32 + lane / 4, block * p.walk.block,
          p.walk.place_in_block<kTile>(tile) + lane % 4 * (kTile / 4)};
}

// Scores before the product: zero, or the bias in the product's units.
template <typename Element, int kHeadDim>
__device__ __forceinline__ void start_tile(const QkPruneParams& p, const QkJob& job, int tile, int row32,
                                           float (&scores)[2][QkConfig<Element, kHeadDim>::kBlocks][4]) {
  using Config = QkConfig<Element, kHeadDim>;
#pragma unroll
  for (int i = 0; i < 2 * Config::kBlocks * 4; ++i)
    scores[i / (Config::kBlocks * 4)][i / 4 % Config::kBlocks][i % 4] = 0;
  if (p.mask.bias != nullptr) {
    add_bias<Config::kBlocks>(p, lane_tile_of<Config::kTile>(p, job, tile, row32),
                              Config::kScaleQ ? p.bias_scale * p.key_scale : p.bias_scale, scores);
  }
}

// Everything after the product: masks where the tile has any, selection, stores.
template <typename Element, int kHeadDim>
__device__ __forceinline__ void finish_tile(const QkPruneParams& p, const QkJob& job, int tile, int row32,
                                            const float (&scores)[2][QkConfig<Element, kHeadDim>::kBlocks][4]) {
  using Config = QkConfig<Element, kHeadDim>;
  LaneKeys<Element> keys(scores, Config::kScaleQ ? 1.0f : p.key_scale);
  const int block_key = p.walk.key_block(job.row_block, p.walk.slot_of_tile<Config::kTile>(tile)) * p.walk.block;
  const int first_key = p.interleaved ? block_key : block_key + p.walk.place_in_block<Config::kTile>(tile);
  const int end_key = first_key + (p.interleaved ? kInterleaveBlock : Config::kTile);
  if (needs_mask(p, row32, first_key, end_key, job.key_length)) {
    const LaneTile lane_tile = lane_tile_of<Config::kTile>(p, job, tile, row32);
    keys.hide(visible_places<Config::kTile / 4>(p, lane_tile, job.key_length));
  }
  LaneResult result;
  keys.prune(p.group_log2, p.value_scale, result);
  store<Element, Config::kTile>(p, job, tile, row32, result);
}

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kQkMaxThreads, (QkConfig<Element, kHeadDim>::kMinCtas))
    qk_prune_kernel(const __grid_constant__ QkPruneParams p) {
  using Config = QkConfig<Element, kHeadDim>;
  extern __shared__ __align__(128) char shared[];
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

  copy_rows<Element, Config::kRowBytes>(
      sQ, gQ, p.q, rows, [&](int row) -> std::int64_t { return job.row0 + row < p.walk.n_q ? job.row0 + row : -1; });
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) load(job.first_tile + s, s);

  std::uint32_t rQ[2][Config::kQInRegisters ? Config::kSteps : 1][4];
  ptx::cp_async_wait<Config::kStages - 2>();
  if constexpr (std::is_same_v<Element, float>) round_rows_tf32<Config::kRowBytes>(sQ, rows);
  __syncthreads();  // Q, copied with the first tile, is visible to all
  if constexpr (Config::kQInRegisters) {
#pragma unroll
    for (int i = 0; i < 2 * Config::kSteps; ++i) {
      load_q_fragment<Config::kRowBytes>(rQ[i % 2][i / 2], sQ, warp_row + 16 * (i % 2), i / 2);
      if constexpr (Config::kScaleQ) scale_fragment<Element>(rQ[i % 2][i / 2], p.key_scale);
    }
  }

  int stage = 0;
  for (int tile = job.first_tile; tile < job.end_tile; ++tile) {
    ptx::cp_async_wait<Config::kStages - 2>();
    if constexpr (std::is_same_v<Element, float>) {
      round_rows_tf32<Config::kRowBytes>(sK + stage * Config::kTileBytes, Config::kTile);
    }
    __syncthreads();  // this tile's copies are visible to all; all have left the stage that is loaded next
    load(tile + Config::kStages - 1, stage == 0 ? Config::kStages - 1 : stage - 1);
    float rScores[2][Config::kBlocks][4];
    start_tile<Element, kHeadDim>(p, job, tile, job.row0 + warp_row, rScores);
    multiply<Element, kHeadDim>(rScores, rQ, sQ, warp_row, sK + stage * Config::kTileBytes);
    finish_tile<Element, kHeadDim>(p, job, tile, job.row0 + warp_row, rScores);
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  ptx::cp_async_wait<0>();
}

}  // namespace dspattn::cuda::sm80
