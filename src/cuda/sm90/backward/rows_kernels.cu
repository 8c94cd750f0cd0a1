#include <cmath>

#include "cuda/device/device.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/sm90/backward/describe.h"
#include "cuda/sm90/backward/rows_kernels.h"
#include "cuda/tile/gradient_walk.h"

namespace dspattn::cuda::sm90::backward {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8;  // elements of 16 bytes

// A query tile: of which head, and what of it exists.
struct QueryTile {
  int head, sequence;
  int number;  // in the workspace, of all heads
  int first;   // row of the sequence
  SequenceRows rows;
};

// One for every CTA: heads of a tile follow each other. False where the sequence has
// fewer tiles.
__device__ __forceinline__ bool own_tile(const BackwardParams& params, QueryTile& tile) {
  if (params.work.n_q == 0) return false;
  tile.head = static_cast<int>(blockIdx.x) % params.work.heads.value;
  const int rest = static_cast<int>(blockIdx.x) / params.work.heads.value;
  const int tiles = (params.work.n_q + params.tile_q - 1) / params.tile_q;
  tile.sequence = rest / tiles;
  const int in_sequence = rest - tile.sequence * tiles;
  tile.rows = sequence_rows(params, tile.sequence);
  tile.first = in_sequence * params.tile_q;
  tile.number = tile.head * params.query_tiles + tile.rows.first_tile + in_sequence;
  return tile.first < tile.rows.rows;
}

struct Chunk {
  std::uint32_t words[4] = {};
};

// Eight elements of a row; columns at and past the end are zeros.
__device__ __forceinline__ Chunk load_chunk(const RowsView& view, std::int64_t offset, int column, int columns,
                                            int vector) {
  Chunk chunk;
  const auto* from = static_cast<const std::uint16_t*>(view.data) + offset + column;
  if (vector != 0) {
    if (column >= columns) return chunk;
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    chunk = {{x.x, x.y, x.z, x.w}};
    return chunk;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (column + i < columns) chunk.words[i / 2] |= static_cast<std::uint32_t>(from[i]) << (i % 2 * 16);
  }
  return chunk;
}

__device__ __forceinline__ void unpack(DType type, std::uint32_t word, float& low, float& high) {
  if (type == DType::bf16) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000u);
  } else {
    ptx::unpack_f16x2(word, low, high);
  }
}

// Where chunk `chunk` of a row lies in a tile: panels of 128 bytes of columns in the swizzle.
__device__ __forceinline__ void store_chunk(std::uint8_t* tile, int rows, int row, int chunk, const Chunk& x) {
  const int offset = chunk / 8 * rows * 128 + tile::swizzled_offset(row, chunk % 8);
  *reinterpret_cast<uint4*>(tile + offset) = make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]);
}

// A row without a key has a log-sum-exp that makes all its weights 0. One that is NaN, or whose Q or dO is not finite,
// gives NaN to all keys that it sees.
__device__ __forceinline__ RowNumbers numbers_of(float lse, float d) {
  constexpr float kLog2E = 1.4426950408889634f;
  if (lse == -INFINITY) return {INFINITY, 0};
  return {std::isfinite(d) ? lse * kLog2E : NAN, d};
}

// A tile's rows; as many lanes share a row as it has chunks of 16 bytes (8, 16 or 32).
__device__ __forceinline__ void write_rows(const BackwardParams& params, const QueryTile& tile) {
  const int lanes = params.dim / kChunk;
  const std::int64_t bytes = static_cast<std::int64_t>(params.tile_q) * params.dim * 2;
  std::uint8_t* q_tile = params.scratch.q + tile.number * bytes;
  std::uint8_t* d_out_tile = params.scratch.d_out + tile.number * bytes;
  const int chunk = static_cast<int>(threadIdx.x) % lanes;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / lanes; row < params.tile_q; row += kThreads / lanes) {
    const bool present = tile.first + row < tile.rows.rows;
    const std::int64_t at = tile.rows.q_row + tile.first + (present ? row : 0);
    const auto load = [&](const RowsView& view, int columns, int vector) {
      return load_chunk(view, view.offset(tile.rows.batch, tile.head, at), chunk * kChunk, present ? columns : 0,
                        vector);
    };
    Chunk q = load(params.q, params.d, params.vector_q);
    const Chunk d_out = load(params.d_out, params.value_d, params.vector_d_out);
    const Chunk out = load(params.out, params.value_d, params.vector_out);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float a0, a1, b0, b1;
      unpack(params.type, d_out.words[i], a0, a1);
      unpack(params.type, out.words[i], b0, b1);
      sum = fmaf(a0, b0, fmaf(a1, b1, sum));
      float q0, q1;
      unpack(params.type, q.words[i], q0, q1);
      sum = fmaf(q0, 0.0f, fmaf(q1, 0.0f, sum));  // NaN where q is not finite
      q.words[i] = params.type == DType::bf16 ? ptx::multiply_bf16x2(q.words[i], params.scales.q_scale)
                                              : ptx::multiply_f16x2(q.words[i], params.scales.q_scale);
    }
    for (int with = 1; with < lanes; with *= 2) sum += __shfl_xor_sync(~0u, sum, with);
    RowNumbers numbers{INFINITY, 0};
    if (present) {
      const float lse = params.lse.data[params.lse.offset(tile.rows.batch, tile.head, at)];
      if (params.d_lse.data != nullptr) sum -= params.d_lse.data[params.d_lse.offset(tile.rows.batch, tile.head, at)];
      numbers = numbers_of(lse, sum);
    }
    // Rows whose gradients do not depend on what they hold must not meet a weight of 0 as a NaN.
    const bool used = std::isfinite(numbers.lse);
    store_chunk(q_tile, params.tile_q, row, chunk, used ? q : Chunk{});
    store_chunk(d_out_tile, params.tile_q, row, chunk, used ? d_out : Chunk{});
    if (chunk == 0) {
      params.scratch.rows[static_cast<std::int64_t>(tile.number) * params.tile_q + row] = numbers;
    }
  }
}

__global__ void __launch_bounds__(kThreads) prepare_rows(const __grid_constant__ BackwardParams params) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.scratch.taken = 0;
  QueryTile tile;
  if (!own_tile(params, tile)) return;
  write_rows(params, tile);
  const int sums = params.wraps != 0 ? 2 : 1;
  const std::int64_t tiles = static_cast<std::int64_t>(params.query_tiles) * params.work.heads.value;
  for (int sum = 0; sum < sums; ++sum) {
    const std::int64_t number = sum * tiles + tile.number;
    if (threadIdx.x < 2) params.scratch.counts[2 * number + threadIdx.x] = 0;
  }
}

// Four values of a sum: two columns of two rows.
__global__ void __launch_bounds__(kThreads) finish_d_q(const __grid_constant__ BackwardParams params) {
  QueryTile tile;
  if (!own_tile(params, tile)) return;
  const int share = params.tile_q * params.dim / 2;  // of a warpgroup: 64 rows, or half of the columns
  const bool by_rows = params.tile_q == 128;
  const int last = min(tile.first + params.tile_q, tile.rows.rows) - 1;
  const tile::KeyBlockRange seen = tile::key_blocks_of(band_of(params, tile.sequence, tile.rows), tile.first, last);
  int shares[2];
#pragma unroll
  for (int sum = 0; sum < 2; ++sum) {
    shares[sum] = tile::shares_of(seen, tile.first / params.tile_q, params.tile_q, 1, params.wraps != 0, sum);
  }
  const std::int64_t tiles = static_cast<std::int64_t>(params.query_tiles) * params.work.heads.value;
  for (int i = static_cast<int>(threadIdx.x); i < share / 2; i += kThreads) {
    float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int sum = 0; sum < 2; ++sum) {
      if (shares[sum] == 0) continue;
      const std::int64_t number = sum * tiles + tile.number;
      const float4 y = *reinterpret_cast<const float4*>(params.scratch.sums + number * 2 * share + 4 * i);
      x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
    const int warpgroup = i / (share / 4);
    const int in_share = i - warpgroup * (share / 4);
    const int thread = in_share % 128;
    const int column = tile::sum_column(in_share / 128, thread, 0) + (by_rows ? 0 : warpgroup * params.dim / 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.first + tile::sum_row(thread, 2 * half) + (by_rows ? warpgroup * 64 : 0);
      if (row >= tile.rows.rows) continue;
      const float a = (half == 0 ? x.x : x.z) * params.d_q_scale;
      const float b = (half == 0 ? x.y : x.w) * params.d_q_scale;
      const std::uint32_t pair = params.type == DType::bf16 ? ptx::pack_bf16x2(a, b) : ptx::pack_f16x2(a, b);
      auto* to = static_cast<std::uint16_t*>(params.d_q.data) +
                 params.d_q.offset(tile.rows.batch, tile.head, tile.rows.q_row + row) + column;
      if (column + 1 < params.d_q.columns && reinterpret_cast<std::uintptr_t>(to) % 4 == 0) {
        *reinterpret_cast<std::uint32_t*>(to) = pair;
      } else {
        if (column < params.d_q.columns) to[0] = static_cast<std::uint16_t>(pair);
        if (column + 1 < params.d_q.columns) to[1] = static_cast<std::uint16_t>(pair >> 16);
      }
    }
  }
}

// All rows of a tensor.
__global__ void __launch_bounds__(kThreads) clear_rows(const OutView view, std::int64_t batch, int heads, int rows) {
  const std::int64_t all = batch * heads * rows;
#pragma unroll 1
  for (std::int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const std::int64_t rest = i / heads;
    const auto sequence = static_cast<int>(rest / rows);
    auto* to = static_cast<std::uint16_t*>(view.data) +
               view.offset(sequence, static_cast<int>(i % heads), rest - static_cast<std::int64_t>(sequence) * rows);
    for (int column = static_cast<int>(threadIdx.x); column < view.columns; column += kThreads) to[column] = 0;
  }
}

unsigned tiles_of(const BackwardParams& params) {
  const std::int64_t tiles = (params.work.n_q + params.tile_q - 1) / params.tile_q;
  return grid_of(tiles * params.sequences * params.work.heads.value);
}

void clear(const OutView& view, std::int64_t batch, int heads, int rows, cudaStream_t stream) {
  if (batch * heads * rows == 0 || view.columns == 0) return;
  launch("clear_rows", &clear_rows, {.ctas = 256, .threads = kThreads}, stream, view, batch, heads, rows);
}

}  // namespace

void launch_clear_keys(const OutView& d_k, const OutView& d_v, std::int64_t batch, int kv_heads, int keys,
                       cudaStream_t stream) {
  clear(d_k, batch, kv_heads, keys, stream);
  clear(d_v, batch, kv_heads, keys, stream);
}

void launch_prepare_rows(const BackwardParams& params, cudaStream_t stream) {
  if (params.work.cumulative_q.present()) {
    // Some rows may belong to no sequence.
    clear(params.d_q, 1, params.work.heads.value, params.work.q_rows, stream);
    clear(params.d_k, 1, params.kv_heads, params.work.k_rows, stream);
    clear(params.d_v, 1, params.kv_heads, params.work.k_rows, stream);
  }
  // At least one CTA, which clears the count of items.
  const unsigned ctas = tiles_of(params);
  launch("prepare_rows", &prepare_rows, {.ctas = ctas > 0 ? ctas : 1, .threads = kThreads}, stream, params);
}

void launch_finish_d_q(const BackwardParams& params, cudaStream_t stream) {
  if (const unsigned ctas = tiles_of(params); ctas > 0) {
    launch("finish_d_q", &finish_d_q, {.ctas = ctas, .threads = kThreads}, stream, params);
  }
}

}  // namespace dspattn::cuda::sm90::backward
