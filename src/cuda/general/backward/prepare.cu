#include <cmath>

#include "core/dropout.h"
#include "cuda/device/device.h"
#include "cuda/general/backward/prepare.h"
#include "cuda/general/backward/walk.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/single.h"

namespace dspattn::cuda::general::backward {
namespace {

constexpr int kThreads = 256;
constexpr float kLog2E = 1.4426950408889634f;

template <DType kType>
inline constexpr int kChunk = kType == DType::f32 ? 4 : 8;  // elements of 16 bytes

template <DType kType>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  return kType == DType::bf16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
}

template <DType kType>
__device__ __forceinline__ float element(const void* data, std::int64_t at, bool fp32) {
  if (kType == DType::f32 || fp32) return static_cast<const float*>(data)[at];
  const std::uint32_t bits = static_cast<const std::uint16_t*>(data)[at];
  if constexpr (kType == DType::bf16) return __uint_as_float(bits << 16);
  float low, high;
  ptx::unpack_f16x2(bits, low, high);
  return low;
}

// The largest number of the type; of fp32, the largest that tf32 holds.
template <DType kType>
inline constexpr float kLargest = kType == DType::f32    ? 0x1.ffcp127f
                                  : kType == DType::bf16 ? 0x1.fep127f
                                                         : 65504.0f;

// Some elements of a row, from column `column` on; those at and past the end are zeros.
template <DType kType>
struct Chunk {
  float values[kChunk<kType>] = {};

  __device__ __forceinline__ Chunk(const void* data, std::int64_t offset, int column, int columns, int vector,
                                   bool fp32) {
    if (vector != 0 && column < columns && (kType == DType::f32 || !fp32)) {
      constexpr int kBytes = kType == DType::f32 ? 4 : 2;
      const uint4 x =
          *reinterpret_cast<const uint4*>(static_cast<const std::uint8_t*>(data) + (offset + column) * kBytes);
      const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < kChunk<kType>; ++i) {
        if constexpr (kType == DType::f32) {
          values[i] = __uint_as_float(words[i]);
        } else if constexpr (kType == DType::bf16) {
          values[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000u);
        } else {
          float low, high;
          ptx::unpack_f16x2(words[i / 2], low, high);
          values[i] = i % 2 == 0 ? low : high;
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kChunk<kType>; ++i) {
      if (column + i < columns) values[i] = element<kType>(data, offset + column + i, fp32);
    }
  }

  // To a prepared row: rounded to tf32 where asked for, 16-bit ones times `scale`, given twice in their type.
  __device__ __forceinline__ void store(std::uint8_t* to, bool tf32, std::uint32_t scale) const {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kType == DType::f32) {
        words[i] = tf32 ? ptx::nearest_tf32(values[i]) : __float_as_uint(values[i]);
      } else {
        const std::uint32_t pair = pack_pair<kType>(values[2 * i], values[2 * i + 1]);
        words[i] = kType == DType::bf16 ? ptx::multiply_bf16x2(pair, scale) : ptx::multiply_f16x2(pair, scale);
      }
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
  __device__ __forceinline__ void clear_nan() {
#pragma unroll
    for (float& value : values) value = std::isnan(value) ? 0.0f : value;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& value : values) value = 0.0f;
  }
  // Of V: rows that keep an infinite one are undefined by their D, to others it is nothing.
  __device__ __forceinline__ void clear_infinite() {
#pragma unroll
    for (float& value : values) value = std::isinf(value) ? 0.0f : value;
  }
  // Of K: a row whose score is -inf does not see the key. It may as well see one of no weight.
  __device__ __forceinline__ void bound_infinite() {
#pragma unroll
    for (float& value : values) value = std::isinf(value) ? copysignf(kLargest<kType>, value) : value;
  }
};

// 1 twice.
template <DType kType>
inline constexpr std::uint32_t kOnePair = kType == DType::bf16 ? 0x3F803F80u : 0x3C003C00u;

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

__device__ __forceinline__ std::uint32_t random_state(const Dropping& dropping, int sequence, int head, int row) {
  std::uint64_t seed = dropping.seed, offset = dropping.offset;
  if (dropping.state != nullptr) {
    const auto word = [&](int i) {
      return std::uint64_t{static_cast<std::uint32_t>(dropping.state[i * dropping.state_stride])};
    };
    seed = word(0) | word(1) << 32;
    offset = word(2) | word(3) << 32;
  }
  return core::DropoutRow::of(seed, offset, static_cast<std::uint32_t>(sequence), static_cast<std::uint32_t>(head),
                              static_cast<std::uint32_t>(row))
      .state;
}

// A CTA's kRowUnit rows of a (sequence, head).
template <DType kType>
__global__ void __launch_bounds__(kThreads, 2) prepare_rows(const __grid_constant__ BackwardParams params) {
  const int sequence_head = static_cast<int>(blockIdx.x) / params.row_units;
  const int begin = (static_cast<int>(blockIdx.x) - sequence_head * params.row_units) * kRowUnit;
  const int sequence = params.work.heads.quotient(sequence_head);
  const int head = params.work.heads.remainder(sequence_head);
  const SequenceRows rows = sequence_rows(params, sequence);
  if (begin >= rows.rows) return;
  const RowLanes own(params.stride);
#pragma unroll 1
  for (int row = begin + own.first; row < begin + kRowUnit; row += own.step) {
    const bool present = row < rows.rows;
    const std::int64_t at = rows.q_row + (present ? row : 0);
    const auto load = [&](const RowsView& view, int chunk, int columns, int vector, bool fp32) {
      return Chunk<kType>(view.data, view.offset(rows.batch, head, at), chunk * kChunk<kType>, present ? columns : 0,
                          vector, fp32);
    };
    const auto load_q = [&](int chunk) { return load(params.q, chunk, params.d, params.vector_q, false); };
    const auto load_d_out = [&](int chunk) {
      return load(params.d_out, chunk, params.value_d, params.vector_d_out, params.fp32_d_out != 0);
    };
    float sum = 0;
    for (int chunk = own.lane; chunk < own.chunks; chunk += own.lanes) {
      const Chunk<kType> q = load_q(chunk), d_out = load_d_out(chunk);
      const Chunk<kType> out = load(params.out, chunk, params.value_d, params.vector_out, params.fp32_out != 0);
#pragma unroll
      for (int i = 0; i < kChunk<kType>; ++i) {
        sum = fmaf(d_out.values[i], out.values[i], sum);
        if (std::isinf(q.values[i])) sum = NAN;
      }
    }
    for (int with = 1; with < own.lanes; with *= 2) sum += __shfl_xor_sync(~0u, sum, with);
    RowNumbers numbers{INFINITY, 0, 0, 0};
    bool used = false;
    if (present) {
      if (params.d_lse.data != nullptr) sum -= params.d_lse.data[params.d_lse.offset(rows.batch, head, at)];
      numbers = numbers_of<kType>(params, params.lse.data[params.lse.offset(rows.batch, head, at)], sum, used);
      if (params.dropping.threshold != 0) numbers.dropout = random_state(params.dropping, sequence, head, row);
    }
    const std::int64_t to = head * params.prepared.head_rows + rows.prepared_row + row;
    for (int chunk = own.lane; chunk < own.chunks; chunk += own.lanes) {
      Chunk<kType> q = load_q(chunk), d_out = load_d_out(chunk);
      if (!used) {
        q.clear();
        d_out.clear();
      }
      q.clear_nan();  // of a row that is defined: it sees no key, but may have a sink
      q.store(params.prepared.q + to * params.stride + 16 * chunk, params.tf32 != 0, params.scales.q_scale);
      d_out.store(params.prepared.d_out + to * params.stride + 16 * chunk, params.tf32 != 0, kOnePair<kType>);
    }
    if (own.lane == 0) params.prepared.numbers[to] = numbers;
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
#pragma unroll 1
  for (int i = own.first; i < kTileUnit * kTileK; i += own.step) {
    const int tile = unit * kTileUnit + i / kTileK;
    const int in_span =
        tile::key_of_column<tile::TileLayout::places, kTileK>(params.tiles, params.tiles.part(tile), i % kTileK);
    const int key = params.tiles.first_key(tile) + in_span;
    const bool present = in_span >= 0 && key < rows.band.key_length;
    const std::int64_t at = rows.k_row + (present ? key : 0);
    std::uint8_t* to =
        params.prepared.keys +
        ((kv_head * params.prepared.head_tiles + rows.prepared_tile + tile) * 2 * kTileK + i % kTileK) * params.stride;
    const auto copy = [&](const RowsView& view, int columns, int vector, bool values, std::uint8_t* row) {
      for (int chunk = own.lane; chunk < own.chunks; chunk += own.lanes) {
        Chunk<kType> x(view.data, view.offset(rows.batch, kv_head, at), chunk * kChunk<kType>, present ? columns : 0,
                       vector, false);
        x.clear_nan();
        if (values) {
          x.clear_infinite();
        } else {
          x.bound_infinite();
        }
        x.store(row + 16 * chunk, params.tf32 != 0, kOnePair<kType>);
      }
    };
    copy(params.k, params.d, params.vector_k, false, to);
    copy(params.v, params.value_d, params.vector_v, true, to + kTileK * params.stride);
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

template <DType kType>
void prepare(const BackwardParams& params, cudaStream_t stream) {
  const std::int64_t sequences = params.sequences;
  if (const unsigned ctas = grid_of(sequences * params.work.heads.value * params.row_units); ctas > 0) {
    launch("prepare_rows", &prepare_rows<kType>, {.ctas = ctas, .threads = kThreads}, stream, params);
  }
  if (const unsigned ctas = grid_of(sequences * params.kv_heads * params.tile_units); ctas > 0) {
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

void launch_sum_bias(const BackwardParams& params, DType type, bool zeros, cudaStream_t stream) {
  const BiasGradient& g = params.bias_gradient;
  const std::int64_t all = std::int64_t{g.extent[0]} * g.extent[1] * g.extent[2] * g.extent[3];
  if (all == 0) return;
  const auto kernel = type == DType::bf16 ? &sum_bias<DType::bf16> : &sum_bias<DType::f16>;
  const auto ctas = static_cast<unsigned>(all < 1024 * kThreads ? (all + kThreads - 1) / kThreads : 1024);
  launch("sum_bias", kernel, {.ctas = ctas, .threads = kThreads}, stream, params, zeros);
}

}  // namespace dspattn::cuda::general::backward
