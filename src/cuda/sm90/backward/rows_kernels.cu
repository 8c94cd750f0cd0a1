#include <algorithm>
#include <cmath>

#include "cuda/blocks/sink.h"
#include "cuda/device/device.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/ordered_sums.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/sm90/backward/describe.h"
#include "cuda/sm90/backward/rows_kernels.h"
#include "cuda/tile/coarse_rows.h"
#include "cuda/tile/gradient_walk.h"

namespace dspattn::cuda::sm90::backward {
namespace {

constexpr int kThreads = 256;
constexpr int kPrepareThreads = 512;  // of prepare_rows, whose warps take a query tile each: as many as registers allow
constexpr int kChunk = 8;             // elements of 16 bytes
constexpr float kCoarseLse = 16384;   // below it tile::coarse_correction() is 1

// A query tile: of which head, and what of it exists.
struct QueryTile {
  int head, sequence;
  int number;  // in the workspace, of all heads
  int first;   // row of the sequence
  SequenceRows rows;
};

// Query tiles of the problem: of a head one behind the other, heads in the order in which items are taken.
__device__ __forceinline__ int sequence_tiles(const BackwardParams& params) {
  return (params.work.n_q + params.tile_q - 1) / params.tile_q;
}

// Number `index` of them. False where the sequence has fewer tiles.
__device__ __forceinline__ bool find_tile(const BackwardParams& params, int index, QueryTile& tile) {
  const int tiles = sequence_tiles(params);
  const int sequence_head = index / tiles;
  const int in_sequence = index - sequence_head * tiles;
  tile.sequence = params.work.heads.quotient(sequence_head);
  tile.head = sequence_head - tile.sequence * params.work.heads.value;
  tile.rows = sequence_rows(params, tile.sequence, params.tile_q);
  tile.first = in_sequence * params.tile_q;
  tile.number = tile.head * params.query_tiles + tile.rows.first_tile + in_sequence;
  return tile.first < tile.rows.rows;
}

struct Chunk {
  std::uint32_t words[4] = {};
};

// A thread's chunk of the rows of a query tile.
struct ChunkReader {
  const std::uint16_t* from;  // of the tile's first row
  std::int64_t row_stride;
  int columns;  // of the chunk that exist; the others are zeros
  int vector;   // 16 bytes at once

  __device__ __forceinline__ ChunkReader(const RowsView& view, const QueryTile& tile, int column, int all, int aligned)
      : from(static_cast<const std::uint16_t*>(view.data) +
             view.offset(tile.rows.batch, tile.head, tile.rows.q_row + tile.first) + column),
        row_stride(view.row_stride),
        columns(all - column),
        vector(aligned) {}

  __device__ __forceinline__ Chunk load(int row, bool present) const {
    Chunk chunk;
    if (!present) return chunk;
    const std::uint16_t* at = from + row * row_stride;
    if (vector != 0) {
      if (columns <= 0) return chunk;
      const uint4 x = *reinterpret_cast<const uint4*>(at);
      return {{x.x, x.y, x.z, x.w}};
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < columns) chunk.words[i / 2] |= static_cast<std::uint32_t>(at[i]) << (i % 2 * 16);
    }
    return chunk;
  }
};

template <DType kType>
__device__ __forceinline__ void unpack(std::uint32_t word, float& low, float& high) {
  if constexpr (kType == DType::bf16) {
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

// Of a query tile in the workspace: its TileNumbers.
__device__ __forceinline__ float* numbers_of_tile(const BackwardParams& params, int number) {
  const int words = tile_number_words(params.tile_q, params.d_copies);
  return reinterpret_cast<float*>(params.scratch.numbers) + static_cast<std::int64_t>(number) * words;
}
__device__ __forceinline__ void store_numbers(const BackwardParams& params, float* tile, int row,
                                              const RowNumbers& numbers) {
  tile[lse_place(row)] = numbers.lse;
  float* minus_d = tile + params.tile_q + d_place(row, params.d_copies);
  minus_d[0] = -numbers.d;
  if (params.d_copies == 2) minus_d[2] = -numbers.d;
}

// What a thread has of a row: its sum of dO * O, NaN where a Q is not finite; and its Q times 2^-e.
template <DType kType>
__device__ __forceinline__ float scale_and_sum(std::uint32_t q_scale, Chunk& q, const Chunk& d_out, const Chunk& out) {
  const auto multiply = [](std::uint32_t a, std::uint32_t b) {
    return kType == DType::bf16 ? ptx::multiply_bf16x2(a, b) : ptx::multiply_f16x2(a, b);
  };
  float sum = 0;
  std::uint32_t zeros = 0;  // or NaN
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float a0, a1, b0, b1;
    unpack<kType>(d_out.words[i], a0, a1);
    unpack<kType>(out.words[i], b0, b1);
    sum = fmaf(a0, b0, fmaf(a1, b1, sum));
    zeros |= multiply(q.words[i], 0);
    q.words[i] = multiply(q.words[i], q_scale);
  }
  return (zeros & 0x7FFF7FFFu) == 0 ? sum : NAN;
}

// dO and D of a row times what its weights must be multiplied by.
template <DType kType>
__device__ __forceinline__ void correct_row(float correction, Chunk& d_out, RowNumbers& numbers) {
  if (correction == 1) return;
  numbers.d *= correction;
#pragma unroll
  for (std::uint32_t& word : d_out.words) {
    float low, high;
    unpack<kType>(word, low, high);
    low *= correction;
    high *= correction;
    word = kType == DType::bf16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
  }
}

// A tile's rows, by a warp; as many lanes share a row as it has chunks of 16 bytes (8, 16 or 32; of 24 chunks 32
// lanes). Whether one of this lane's is NaN.
template <DType kType>
__device__ __forceinline__ bool write_rows(const BackwardParams& params, const QueryTile& tile, int lane) {
  const int chunks = params.dim / kChunk;
  const int lanes = chunks == 24 ? 32 : chunks;
  const std::int64_t bytes = static_cast<std::int64_t>(params.tile_q) * params.dim * 2;
  std::uint8_t* q_tile = params.scratch.q + tile.number * bytes;
  std::uint8_t* d_out_tile = params.scratch.d_out + tile.number * bytes;
  float* numbers_tile = numbers_of_tile(params, tile.number);
  const int chunk = lane % lanes;
  const ChunkReader read_q(params.q, tile, chunk * kChunk, params.d, params.vector_q);
  const ChunkReader read_d_out(params.d_out, tile, chunk * kChunk, params.value_d, params.vector_d_out);
  const ChunkReader read_out(params.out, tile, chunk * kChunk, params.value_d, params.vector_out);
  const std::int64_t first_row = tile.rows.q_row + tile.first;
  const float* lses = params.lse.data + params.lse.offset(tile.rows.batch, tile.head, first_row);
  const float* d_lses = params.d_lse.data + params.d_lse.offset(tile.rows.batch, tile.head, first_row);
  bool has_nan = false;
  // A batch of rows is loaded before any of it is used: with one at a time the kernel waited for memory.
  constexpr int kBatch = 4;
  const int apart = 32 / lanes;
#pragma unroll 1
  for (int first = lane / lanes; first < params.tile_q; first += kBatch * apart) {
    Chunk q[kBatch], d_out[kBatch], out[kBatch];
    float lse[kBatch], d_lse[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int row = first + b * apart;
      const bool present = row < params.tile_q && tile.first + row < tile.rows.rows;
      q[b] = read_q.load(row, present);
      d_out[b] = read_d_out.load(row, present);
      out[b] = read_out.load(row, present);
      lse[b] = present ? lses[row * params.lse.row_stride] : -INFINITY;
      d_lse[b] = present && params.d_lse.data != nullptr ? d_lses[row * params.d_lse.row_stride] : 0.0f;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int row = first + b * apart;
      float sum = scale_and_sum<kType>(params.scales.q_scale, q[b], d_out[b], out[b]);
      for (int with = 1; with < lanes; with *= 2) sum += __shfl_xor_sync(~0u, sum, with);
      RowNumbers numbers = numbers_of(lse[b], sum - d_lse[b]);
      if (row >= params.tile_q) continue;
      if (fabsf(lse[b]) > kCoarseLse) {
        correct_row<kType>(tile::coarse_correction(lse[b], params.scales.exp2_scale), d_out[b], numbers);
      }
      // Rows whose gradients do not depend on what they hold must not meet a weight of 0 as a NaN.
      const bool used = std::isfinite(numbers.lse);
      if (chunk < chunks) {
        store_chunk(q_tile, params.tile_q, row, chunk, used ? q[b] : Chunk{});
        store_chunk(d_out_tile, params.tile_q, row, chunk, used ? d_out[b] : Chunk{});
      }
      if (chunk == 0) store_numbers(params, numbers_tile, row, numbers);
      has_nan = has_nan || std::isnan(numbers.lse);
    }
  }
  return has_nan;
}

// Runs beside the fused backward, which begins on multiprocessors that have no CTA of this one, or none any more. So a
// head's tiles are counted when they are written, and items wait for their own.
template <DType kType>
__global__ void __launch_bounds__(kPrepareThreads, 1)
    prepare_rows(const __grid_constant__ BackwardParams params, const int tiles) {
  ptx::wait_for_kernels_before();  // counters are 0
  ptx::start_next_kernel();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int ctas = static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x) + warp * ctas; index < tiles; index += kPrepareThreads / 32 * ctas) {
    QueryTile tile;
    if (!find_tile(params, index, tile)) continue;
    const bool has_nan = __all_sync(~0u, write_rows<kType>(params, tile, lane) ? 0 : 1) == 0;
    if (lane < kMarkCopies) {
      reinterpret_cast<std::int32_t*>(numbers_of_tile(params, tile.number) +
                                      (1 + params.d_copies) * params.tile_q)[lane] = has_nan ? 1 : 0;
    }
    __syncwarp();  // the tile is written
    if (lane == 0) {
      const int kv_head = params.work.heads_per_kv_head.quotient(tile.head);
      ptx::count_up(params.scratch.ready + tile.sequence * params.kv_heads.value + kv_head);
    }
  }
  __syncthreads();  // all warps have counted theirs
  if (threadIdx.x == 0) ptx::count_up(params.scratch.prepared);
}

__global__ void __launch_bounds__(kThreads) clear_counters(std::int32_t* counters, const int count) {
  ptx::start_next_kernel();
  for (int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x) * kThreads) {
    counters[i] = 0;
  }
}

// dQ of two rows, 32 columns of them, from its sums: what one thread had in an accumulator.
__device__ __forceinline__ void finish_columns(const BackwardParams& params, const QueryTile& tile,
                                               const bool (&sums)[2], int part) {
  const std::int64_t tiles = static_cast<std::int64_t>(params.query_tiles) * params.work.heads.value;
  const int thread = part % 128;
  const int column_of_all = part / 128 * 32;  // as if all panels of 64 rows lay side by side
  float4 x[2][4] = {};
#pragma unroll
  for (int sum = 0; sum < 2; ++sum) {
    if (!sums[sum]) continue;
    const std::int64_t first =
        (sum * tiles + tile.number) * params.tile_q * params.dim + column_of_all * 64 + 4 * thread;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      x[sum][b] = ptx::load_sum_16(params.scratch.sums + first + 4 * 128 * b);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile.first + column_of_all / params.dim * 64 + tile::sum_row(thread, 2 * half);
    std::uint32_t words[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float low = (half == 0 ? x[0][b].x + x[1][b].x : x[0][b].z + x[1][b].z) * params.d_q_scale;
      const float high = (half == 0 ? x[0][b].y + x[1][b].y : x[0][b].w + x[1][b].w) * params.d_q_scale;
      words[b] = params.type == DType::bf16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
    }
    const bool present = row < tile.rows.rows;
    auto* to = static_cast<std::uint16_t*>(params.d_q.data) +
               params.d_q.offset(tile.rows.batch, tile.head, tile.rows.q_row + (present ? row : 0));
    const int first = column_of_all % params.dim;
    if (params.vector_d_q != 0) {  // lane t takes columns 8t..8t+7 of these 32
      transpose_quad(words, thread & 3);
      const int column = first + 8 * (thread & 3);
      if (present && column < params.d_q.columns) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
      continue;
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int column = first + 8 * b + 2 * (thread & 3);
      if (present && column < params.d_q.columns) to[column] = static_cast<std::uint16_t>(words[b]);
      if (present && column + 1 < params.d_q.columns) to[column + 1] = static_cast<std::uint16_t>(words[b] >> 16);
    }
  }
}

// Runs beside the fused backward, on multiprocessors that have no items, or none any more: warps take 32 columns of a
// tile, which wait for that tile's shares only. The last CTA waits for that kernel's end, so that this one does not end
// before it.
__global__ void __launch_bounds__(kThreads, 4)
    finish_d_q(const __grid_constant__ BackwardParams params, const int units) {
  if (blockIdx.x == gridDim.x - 1) ptx::wait_for_kernels_before();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int units_of_tile = params.tile_q * params.dim / (16 * 128);
  const std::int64_t tiles = static_cast<std::int64_t>(params.query_tiles) * params.work.heads.value;
#pragma unroll 1
  for (;;) {
    int unit = lane == 0 ? atomicAdd(params.scratch.finished, 1) : 0;
    unit = __shfl_sync(~0u, unit, 0);
    if (unit >= units) return;
    QueryTile tile;
    const int index = unit / units_of_tile;
    if (!find_tile(params, index, tile)) continue;
    const int last = min(tile.first + params.tile_q, tile.rows.rows) - 1;
    const tile::KeyBlockRange seen = tile::key_blocks_of(band_of(params, tile.sequence, tile.rows), tile.first, last);
    bool sums[2];  // that hold anything
#pragma unroll
    for (int sum = 0; sum < 2; ++sum) {
      const int shares =
          tile::shares_of(seen, tile.first / params.tile_q, params.tile_q, params.block_tiles, params.wraps != 0, sum);
      sums[sum] = shares > 0;
      if (sums[sum] && lane == 0) ptx::await_count(params.scratch.counts + sum * tiles + tile.number, shares);
    }
    __syncwarp();  // all shares are in, for all lanes
#pragma unroll 2
    for (int part = 0; part < 128; part += 32) {
      finish_columns(params, tile, sums, (unit - index * units_of_tile) * 128 + part + lane);
    }
  }
}

// Rows of a tensor that no sequence has: those before the first of a packed batch and past its last. Where it is not
// packed, all.
__global__ void __launch_bounds__(kThreads) clear_rows(const OutView view, std::int64_t batch, int heads, int rows,
                                                       const tile::LengthsView cumulative, int sequences) {
  int first = 0, used = 0;
  if (cumulative.present()) {
    first = tile::clamp_length(cumulative.at(0), 0, rows);
    used = tile::clamp_length(cumulative.at(sequences), first, rows) - first;
  }
  const int cleared = rows - used;
  const std::int64_t all = batch * heads * cleared;
#pragma unroll 1
  for (std::int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const std::int64_t rest = i / heads;
    const auto sequence = static_cast<int>(rest / cleared);
    const auto row = static_cast<int>(rest - static_cast<std::int64_t>(sequence) * cleared);
    auto* to = static_cast<std::uint16_t*>(view.data) +
               view.offset(sequence, static_cast<int>(i % heads), row < first ? row : row + used);
    for (int column = static_cast<int>(threadIdx.x); column < view.columns; column += kThreads) to[column] = 0;
  }
}

unsigned tiles_of(const BackwardParams& params) {
  const std::int64_t tiles = (params.work.n_q + params.tile_q - 1) / params.tile_q;
  return grid_of(tiles * params.sequences * params.work.heads.value);
}

void clear(const OutView& view, std::int64_t batch, int heads, int rows, const tile::LengthsView& cumulative,
           int sequences, cudaStream_t stream) {
  if (batch * heads * rows == 0 || view.columns == 0) return;
  launch("clear_rows", &clear_rows, {.ctas = 256, .threads = kThreads}, stream, view, batch, heads, rows, cumulative,
         sequences);
}

}  // namespace

void launch_clear_keys(const OutView& d_k, const OutView& d_v, std::int64_t batch, int kv_heads, int keys,
                       cudaStream_t stream) {
  clear(d_k, batch, kv_heads, keys, {}, 0, stream);
  clear(d_v, batch, kv_heads, keys, {}, 0, stream);
}

void launch_clear_counters(void* counters, std::size_t bytes, cudaStream_t stream) {
  constexpr std::size_t kEach = 16 * kThreads * sizeof(std::int32_t);
  const std::size_t ctas = std::min<std::size_t>((bytes + kEach - 1) / kEach, 64);
  launch("clear_counters", &clear_counters, {.ctas = static_cast<unsigned>(ctas), .threads = kThreads}, stream,
         static_cast<std::int32_t*>(counters), static_cast<int>(bytes / sizeof(std::int32_t)));
}

void launch_prepare_rows(const BackwardParams& params, cudaStream_t stream) {
  if (const WorkParams& work = params.work; work.cumulative_q.present()) {
    clear(params.d_q, 1, work.heads.value, work.q_rows, work.cumulative_q, params.sequences, stream);
    clear(params.d_k, 1, params.kv_heads.value, work.k_rows, work.cumulative_k, params.sequences, stream);
    clear(params.d_v, 1, params.kv_heads.value, work.k_rows, work.cumulative_k, params.sequences, stream);
  }
  launch("prepare_rows", params.type == DType::bf16 ? &prepare_rows<DType::bf16> : &prepare_rows<DType::f16>,
         {.ctas = static_cast<unsigned>(params.prepare_ctas), .threads = kPrepareThreads, .may_overlap = true}, stream,
         params, static_cast<int>(tiles_of(params)));
}

void launch_finish_d_q(const BackwardParams& params, cudaStream_t stream) {
  const std::int64_t units = std::int64_t{tiles_of(params)} * (params.tile_q * params.dim / (16 * 128));
  if (units == 0) return;
  const std::int64_t ctas = std::min<std::int64_t>((units + kThreads / 32 - 1) / (kThreads / 32), params.finish_ctas);
  launch("finish_d_q", &finish_d_q, {.ctas = static_cast<unsigned>(ctas), .threads = kThreads, .may_overlap = true},
         stream, params, static_cast<int>(units));
}

}  // namespace dspattn::cuda::sm90::backward
