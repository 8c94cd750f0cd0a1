#include <cmath>
#include <type_traits>

#include "cuda/device/device.h"
#include "cuda/general/backward/chunk.h"
#include "cuda/general/backward/prepare.h"
#include "cuda/general/backward/walk.h"
#include "cuda/ptx/single.h"
#include "cuda/tile/gradient_walk.h"

namespace dspattn::cuda::general::backward {
namespace {

constexpr int kThreads = 256;
constexpr float kLog2E = 1.4426950408889634f;

// As many lanes share a row as it has chunks, at most a warp's.
struct RowLanes {
  int chunks, lanes, lane, first, step;

  __device__ __forceinline__ explicit RowLanes(int stride) {
    chunks = (stride - 16) / 16;
    lanes = chunks < 32 ? chunks : 32;
    lane = static_cast<int>(threadIdx.x) % lanes;
    first = static_cast<int>(threadIdx.x) / lanes;
    step = kThreads / lanes;
  }
};

// Weights of a row without a key are 0. One whose LSE or D is NaN, or whose Q is infinite, gives NaN to all keys that
// it sees. used: Q and dO of the row count. Where there is a bias an infinite LSE of fp32 may be that of a row with
// keys (references.h).
template <DType kType>
__device__ __forceinline__ RowNumbers numbers_of(const BackwardParams& params, float lse, float d, bool& used) {
  used = std::isfinite(d) &&
         (std::isfinite(lse) || (kType == DType::f32 && params.bias.data != nullptr && std::isinf(lse)));
  if (std::isinf(lse)) return {INFINITY, used ? d : 0.0f, 0, 0};
  return {used ? lse * kLog2E : NAN, used ? d : 0.0f, 0, 0};
}

// dO.O of a chunk, added to `sum`; NaN where Q is infinite.
template <DType kType>
__device__ __forceinline__ float dot_of(float sum, const Chunk<kType>& q, const Chunk<kType>& d_out,
                                        const Chunk<kType>& out) {
#pragma unroll
  for (int i = 0; i < kChunk<kType>; ++i) {
    sum = fmaf(d_out.values[i], out.values[i], sum);
    if (std::isinf(q.values[i])) sum = NAN;
  }
  return sum;
}

// Rows whose loads a thread has on their way at once: one alone leaves the memory idle. Of vectors four, as 16 bytes
// that are looked at when all are on their way.
template <bool kVectors>
inline constexpr int kRowsAtOnce = kVectors ? 4 : 2;
template <DType kType, bool kVectors>
using Loaded = std::conditional_t<kVectors, uint4, Chunk<kType>>;

// The 16 bytes between a prepared row and the next mean nothing, but are copied with it.
__device__ __forceinline__ void clear_padding(std::uint8_t* row, int stride) {
  *reinterpret_cast<uint4*>(row + stride - 16) = uint4{};
}

// A CTA's kRowUnit rows of a (sequence, head). kVectors: rows of Q, dO and O are aligned to 16 bytes, and of type
// kType.
template <DType kType, bool kVectors>
__global__ void __launch_bounds__(kThreads, 2) prepare_rows(const __grid_constant__ BackwardParams params) {
  const int sequence_head = static_cast<int>(blockIdx.x) / params.row_units;
  const int begin = (static_cast<int>(blockIdx.x) - sequence_head * params.row_units) * kRowUnit;
  const int sequence = params.work.heads.quotient(sequence_head);
  const int head = params.work.heads.remainder(sequence_head);
  const SequenceRows rows = sequence_rows(params, sequence);
  if (params.adds_queries != 0 && static_cast<int>(threadIdx.x) < kRowUnit / params.key_tile_q) {
    // No share of these query tiles is in.
    const std::int64_t head_tiles = params.prepared.head_rows / params.key_tile_q;
    const std::int64_t number = (rows.prepared_row + begin) / params.key_tile_q + threadIdx.x;
    for (int sum = 0; sum < 1 + params.wraps; ++sum) {
      params.prepared.counts[(static_cast<std::int64_t>(sum) * params.work.heads.value + head) * head_tiles + number] =
          0;
    }
  }
  if (params.adds_queries != 0 && blockIdx.x == 0 && threadIdx.x == 0) *params.prepared.taken = 0;
  if (begin >= rows.rows) return;
  const RowLanes own(params.stride);
  constexpr int kAtOnce = kRowsAtOnce<kVectors>;
#pragma unroll 1
  for (int row = begin + own.first; row < begin + kRowUnit; row += kAtOnce * own.step) {
    const auto is_present = [&](int i) { return row + i * own.step < rows.rows; };
    const auto at = [&](int i) { return std::int64_t{rows.q_row + (is_present(i) ? row + i * own.step : 0)}; };
    const auto load = [&](int i, const RowsView& view, int chunk, int columns, int vector,
                          bool fp32) -> Loaded<kType, kVectors> {
      const std::int64_t offset = view.offset(rows.batch, head, at(i));
      const int column = chunk * kChunk<kType>;
      if constexpr (kVectors) {
        const auto* from = static_cast<const std::uint8_t*>(view.data) + (offset + column) * (16 / kChunk<kType>);
        return is_present(i) && column < columns ? *reinterpret_cast<const uint4*>(from) : uint4{};
      } else {
        return Chunk<kType>(view.data, offset, column, is_present(i) ? columns : 0, vector, fp32);
      }
    };
    const auto load_q = [&](int i, int chunk) { return load(i, params.q, chunk, params.d, params.vector_q, false); };
    const auto load_d_out = [&](int i, int chunk) {
      return load(i, params.d_out, chunk, params.value_d, params.vector_d_out, params.fp32_d_out != 0);
    };
    const auto load_out = [&](int i, int chunk) {
      return load(i, params.out, chunk, params.value_d, params.vector_out, params.fp32_out != 0);
    };
    Loaded<kType, kVectors> q[kAtOnce], d_out[kAtOnce], out[kAtOnce];
    float lse[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      q[i] = load_q(i, own.lane);
      d_out[i] = load_d_out(i, own.lane);
      out[i] = load_out(i, own.lane);
      lse[i] = is_present(i) ? params.lse.data[params.lse.offset(rows.batch, head, at(i))] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      Chunk<kType> own_q(q[i]), own_d_out(d_out[i]);
      float sum = dot_of(0.0f, own_q, own_d_out, Chunk<kType>(out[i]));
      for (int chunk = own.lane + own.lanes; chunk < own.chunks; chunk += own.lanes) {
        sum = dot_of(sum, Chunk<kType>(load_q(i, chunk)), Chunk<kType>(load_d_out(i, chunk)),
                     Chunk<kType>(load_out(i, chunk)));
      }
      for (int with = 1; with < own.lanes; with *= 2) sum += __shfl_xor_sync(~0u, sum, with);
      RowNumbers numbers{INFINITY, 0, 0, 0};
      bool used = false;
      if (is_present(i)) {
        if (params.d_lse.data != nullptr) sum -= params.d_lse.data[params.d_lse.offset(rows.batch, head, at(i))];
        numbers = numbers_of<kType>(params, lse[i], sum, used);
        if (params.dropping.threshold != 0) {
          numbers.dropout = params.dropping.random.row(sequence, head, row + i * own.step).state;
        }
      }
      const std::int64_t to = head * params.prepared.head_rows + rows.prepared_row + row + i * own.step;
      const auto store = [&](int chunk, Chunk<kType>& of_q, Chunk<kType>& of_d_out) {
        if (!used) {
          of_q.clear();
          of_d_out.clear();
        }
        of_q.clear_nan();  // of a row that is defined: it sees no key, but may have a sink
        of_q.store(params.prepared.q + to * params.stride + 16 * chunk, params.tf32 != 0, params.scales.q_scale);
        of_d_out.store(params.prepared.d_out + to * params.stride + 16 * chunk, params.tf32 != 0, kOnePair<kType>);
      };
      store(own.lane, own_q, own_d_out);
      for (int chunk = own.lane + own.lanes; chunk < own.chunks; chunk += own.lanes) {
        Chunk<kType> next_q(load_q(i, chunk)), next_d_out(load_d_out(i, chunk));
        store(chunk, next_q, next_d_out);
      }
      if (own.lane == 0) {
        params.prepared.numbers[to] = numbers;
        clear_padding(params.prepared.q + to * params.stride, params.stride);
        clear_padding(params.prepared.d_out + to * params.stride, params.stride);
      }
    }
  }
}

// A CTA's kTileUnit key tiles of a (sequence, key head).
template <DType kType>
__global__ void __launch_bounds__(kThreads, 2) prepare_keys(const __grid_constant__ BackwardParams params) {
  constexpr int kTileK = 32;
  const int sequence_head = static_cast<int>(blockIdx.x) / params.tile_units;
  const int unit = static_cast<int>(blockIdx.x) - sequence_head * params.tile_units;
  const int sequence = sequence_head / params.kv_heads;
  const int kv_head = sequence_head - sequence * params.kv_heads;
  const SequenceRows rows = sequence_rows(params, sequence);
  if (params.tiles.first_key(unit * kTileUnit) >= rows.keys) return;
  const RowLanes own(params.stride);
  constexpr int kAtOnce = kRowsAtOnce<false>;
  const auto key_of = [&](int i) {
    const int row = i % kTileK;
    return key_of_tile_column(params.tiles, rows.band, unit * kTileUnit + i / kTileK,
                              params.key_rows != 0 ? tile::column_of_key_row(row) : row);
  };
#pragma unroll 1
  for (int first = own.first; first < kTileUnit * kTileK; first += kAtOnce * own.step) {
#pragma unroll 1
    for (int chunk = own.lane; chunk < own.chunks; chunk += own.lanes) {
      const auto load = [&](int i, const RowsView& view, int columns, int vector) {
        const int key = key_of(first + i * own.step);
        return Chunk<kType>(view.data, view.offset(rows.batch, kv_head, rows.k_row + max(key, 0)),
                            chunk * kChunk<kType>, key >= 0 ? columns : 0, vector, false);
      };
      static_assert(kAtOnce == 2);
      Chunk<kType> k[kAtOnce] = {load(0, params.k, params.d, params.vector_k),
                                 load(1, params.k, params.d, params.vector_k)};
      Chunk<kType> v[kAtOnce] = {load(0, params.v, params.value_d, params.vector_v),
                                 load(1, params.v, params.value_d, params.vector_v)};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * own.step;
        const std::int64_t tile =
            kv_head * params.prepared.head_tiles + rows.prepared_tile + unit * kTileUnit + at / kTileK;
        std::uint8_t* k_row = params.prepared.keys + (tile * 2 * kTileK + at % kTileK) * params.stride;
        std::uint8_t* v_row = k_row + kTileK * params.stride;
        k[i].clean_keys();
        k[i].store(k_row + 16 * chunk, params.tf32 != 0, kOnePair<kType>);
        v[i].clean_values();
        v[i].store(v_row + 16 * chunk, params.tf32 != 0, kOnePair<kType>);
        if (chunk == 0) {
          clear_padding(k_row, params.stride);
          clear_padding(v_row, params.stride);
        }
      }
    }
  }
}

// All rows of a tensor.
__global__ void __launch_bounds__(kThreads) clear_rows(const ClearedRows cleared) {
  const std::int64_t all = cleared.batch * cleared.heads * cleared.rows;
#pragma unroll 1
  for (std::int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const std::int64_t rest = i / cleared.heads;
    const auto batch = static_cast<int>(rest / cleared.rows);
    const std::int64_t at =
        cleared.view.offset(batch, static_cast<int>(i % cleared.heads), rest - batch * cleared.rows);
    for (int column = static_cast<int>(threadIdx.x); column < cleared.view.columns; column += kThreads) {
      if (cleared.element_bytes == 4) {
        static_cast<float*>(cleared.view.data)[at + column] = 0;
      } else {
        static_cast<std::uint16_t*>(cleared.view.data)[at + column] = 0;
      }
    }
  }
}

__global__ void clear_sinks(float* d_sinks, std::int64_t stride) { d_sinks[blockIdx.x * stride] = 0; }

// A CTA a head: every thread adds the rows that fall to it, and then the threads' sums are added, in a fixed order.
__global__ void __launch_bounds__(kThreads) sink_gradients(const __grid_constant__ BackwardParams params) {
  __shared__ float sums[kThreads];
  const auto head = static_cast<int>(blockIdx.x);
  const float sink = params.sinks[head * params.sink_stride] * kLog2E;
  float sum = 0;
#pragma unroll 1
  for (int sequence = 0; sequence < params.sequences; ++sequence) {
    const SequenceRows rows = sequence_rows(params, sequence);
    const RowNumbers* numbers = params.prepared.numbers + head * params.prepared.head_rows + rows.prepared_row;
    for (int row = static_cast<int>(threadIdx.x); row < rows.rows; row += kThreads) {
      const RowNumbers own = numbers[row];
      sum = fmaf(ptx::exp2_fast(sink - own.lse), -own.d, sum);
    }
  }
  sums[threadIdx.x] = sum;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();  // the sums before are there
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) params.d_sinks[head * params.d_sink_stride] = sums[0];
}

// A thread an element.
template <DType kType>
__global__ void __launch_bounds__(kThreads) sum_bias(const __grid_constant__ BackwardParams params, bool zeros) {
  const BiasGradient& g = params.bias_gradient;
  const std::int64_t rows = g.extent[2], keys = g.extent[3];
  const std::int64_t all = g.extent[0] * g.extent[1] * rows * keys;
  const int heads = params.work.heads.value;
#pragma unroll 1
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < all;
       i += gridDim.x * std::int64_t{kThreads}) {
    const std::int64_t key = i % keys, row = i / keys % rows;
    const auto head = static_cast<int>(i / keys / rows % g.extent[1]);
    const auto batch = static_cast<int>(i / keys / rows / g.extent[1]);
    const bool all_heads = g.extent[1] == 1, all_sequences = g.extent[0] == 1;
    float sum = 0;
    // The tensor of a packed batch may have more rows and keys than any sequence.
    const bool inside = (g.sums_rows != 0 || row < params.work.n_q) && (g.sums_keys != 0 || key < params.work.n_k);
    if (!zeros && inside) {
      for (int s = all_sequences ? 0 : batch; s < (all_sequences ? params.sequences : batch + 1); ++s) {
        for (int h = all_heads ? 0 : head; h < (all_heads ? heads : head + 1); ++h) {
          sum += params.prepared.bias_parts[((static_cast<std::int64_t>(s) * heads + h) * rows + row) * keys + key];
        }
      }
    }
    const std::int64_t at = batch * g.stride[0] + head * g.stride[1] + row * g.stride[2] + key * g.stride[3];
    if (g.is_fp32 != 0) {
      static_cast<float*>(g.data)[at] = sum;
    } else {
      static_cast<std::uint16_t*>(g.data)[at] = static_cast<std::uint16_t>(pack_pair<kType>(sum, sum));
    }
  }
}

// dQ from its sums, which lie as the key-stationary kernel's lanes hold them (Share of config.h).
template <DType kType>
__global__ void __launch_bounds__(kThreads) finish_queries(const __grid_constant__ BackwardParams params) {
  const int rows_of_tile = params.key_tile_q;
  const int tiles = (params.work.n_q + rows_of_tile - 1) / rows_of_tile;
  const int sequence_head = static_cast<int>(blockIdx.x) / tiles;
  const int tile = static_cast<int>(blockIdx.x) - sequence_head * tiles;
  const int sequence = params.work.heads.quotient(sequence_head);
  const int head = params.work.heads.remainder(sequence_head);
  const SequenceRows rows = sequence_rows(params, sequence);
  const int first = tile * rows_of_tile;
  if (first >= rows.rows) return;
  const int dim = (params.stride - 16) / (kType == DType::f32 ? 4 : 2);
  const tile::KeyBlockRange seen = tile::key_blocks_of(rows.band, first, min(first + rows_of_tile, rows.rows) - 1);
  const std::int64_t head_tiles = params.prepared.head_rows / rows_of_tile;
  const float* sums[2];
  for (int sum = 0; sum < 2; ++sum) {
    const bool any =
        (sum == 0 || params.wraps != 0) && tile::shares_of(seen, tile, rows_of_tile, 1, params.wraps != 0, sum) > 0;
    const std::int64_t number = (static_cast<std::int64_t>(sum) * params.work.heads.value + head) * head_tiles +
                                rows.prepared_row / rows_of_tile + tile;
    sums[sum] = any ? params.prepared.sums + number * rows_of_tile * dim : nullptr;
  }
  // Eight neighbouring columns of a row at a time: of a quad's lanes, which lie side by side, elements e and e + 1.
  const int of_block = dim / 8, of_chunk = rows_of_tile / 32 * of_block;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rows_of_tile * dim / 8; i += kThreads) {
    const int g = i % 8, half = i / 8 % 2, eight = i / 16 % (dim / 32), sixteen = i / 16 / (dim / 32);
    const int chunk = sixteen / (rows_of_tile / 32), block = sixteen % (rows_of_tile / 32);
    const int row = first + chunk / 4 * (rows_of_tile / 2) + 16 * block + 8 * half + g;
    if (row >= rows.rows) continue;
    const int at = (chunk * of_chunk + block * of_block + 4 * eight + 2 * half) * 32 + 4 * g;
    float x[8] = {};
    for (const float* sum : sums) {
      if (sum == nullptr) continue;
      const float4 even = *reinterpret_cast<const float4*>(sum + at);
      const float4 odd = *reinterpret_cast<const float4*>(sum + at + 32);
      const float more[8] = {even.x, odd.x, even.y, odd.y, even.z, odd.z, even.w, odd.w};
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] += more[c];
    }
#pragma unroll
    for (float& value : x) value *= params.d_q_scale;
    const int column = chunk % 4 * (dim / 4) + 8 * eight;
    const std::int64_t to = params.d_q.offset(rows.batch, head, rows.q_row + row);
    if (kType != DType::f32 && params.fp32_d_q == 0 && column + 8 <= params.d_q.columns) {
      auto* eight_columns = static_cast<std::uint16_t*>(params.d_q.data) + to + column;
      if (reinterpret_cast<std::uintptr_t>(eight_columns) % 16 == 0) {
        *reinterpret_cast<uint4*>(eight_columns) =
            make_uint4(pack_pair<kType>(x[0], x[1]), pack_pair<kType>(x[2], x[3]), pack_pair<kType>(x[4], x[5]),
                       pack_pair<kType>(x[6], x[7]));
        continue;
      }
    }
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      store_pair<kType>(params.d_q, params.fp32_d_q != 0, to, column + c, x[c], x[c + 1]);
    }
  }
}

template <DType kType>
void finish(const BackwardParams& params, cudaStream_t stream) {
  const std::int64_t tiles = (params.work.n_q + params.key_tile_q - 1) / params.key_tile_q;
  if (const unsigned ctas = grid_of(tiles * params.sequences * params.work.heads.value); ctas > 0) {
    launch("finish_queries", &finish_queries<kType>, {.ctas = ctas, .threads = kThreads}, stream, params);
  }
}

template <DType kType>
void prepare(const BackwardParams& params, cudaStream_t stream) {
  const std::int64_t sequences = params.sequences;
  if (const unsigned ctas = grid_of(sequences * params.work.heads.value * params.row_units); ctas > 0) {
    const bool mixed = kType != DType::f32 && (params.fp32_out != 0 || params.fp32_d_out != 0);
    const bool vectors = params.vector_q != 0 && params.vector_out != 0 && params.vector_d_out != 0 && !mixed;
    launch("prepare_rows", vectors ? &prepare_rows<kType, true> : &prepare_rows<kType, false>,
           {.ctas = ctas, .threads = kThreads}, stream, params);
  }
  if (const unsigned ctas = grid_of(sequences * params.kv_heads * params.tile_units);
      ctas > 0 && params.loads_keys == 0) {
    launch("prepare_keys", &prepare_keys<kType>, {.ctas = ctas, .threads = kThreads}, stream, params);
  }
}

}  // namespace

void launch_clear(const ClearedRows& rows, cudaStream_t stream) {
  if (rows.batch * rows.heads * rows.rows == 0 || rows.view.columns == 0) return;
  launch("clear_rows", &clear_rows, {.ctas = 256, .threads = kThreads}, stream, rows);
}

void launch_prepare(const BackwardParams& params, DType type, cudaStream_t stream) {
  type == DType::bf16  ? prepare<DType::bf16>(params, stream)
  : type == DType::f16 ? prepare<DType::f16>(params, stream)
                       : prepare<DType::f32>(params, stream);
}

void launch_clear_sinks(float* d_sinks, std::int64_t stride, unsigned heads, cudaStream_t stream) {
  if (heads > 0) launch("clear_sinks", &clear_sinks, {.ctas = heads, .threads = 1}, stream, d_sinks, stride);
}

void launch_sink_gradients(const BackwardParams& params, cudaStream_t stream) {
  const auto heads = static_cast<unsigned>(params.work.heads.value);
  launch("sink_gradients", &sink_gradients, {.ctas = heads, .threads = kThreads}, stream, params);
}

void launch_finish_queries(const BackwardParams& params, DType type, cudaStream_t stream) {
  type == DType::bf16  ? finish<DType::bf16>(params, stream)
  : type == DType::f16 ? finish<DType::f16>(params, stream)
                       : finish<DType::f32>(params, stream);
}

void launch_sum_bias(const BackwardParams& params, DType type, bool zeros, cudaStream_t stream) {
  const BiasGradient& g = params.bias_gradient;
  const std::int64_t all = std::int64_t{g.extent[0]} * g.extent[1] * g.extent[2] * g.extent[3];
  if (all == 0) return;
  const auto kernel = type == DType::bf16 ? &sum_bias<DType::bf16> : &sum_bias<DType::f16>;
  const auto ctas = static_cast<unsigned>(all < 1024 * kThreads ? (all + kThreads - 1) / kThreads : 1024);
  launch("sum_bias", kernel, {.ctas = ctas, .threads = kThreads}, stream, params, zeros);
}

}  // namespace dspattn::cuda::general::backward
