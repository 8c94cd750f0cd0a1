#include <cmath>

#include "cuda/blocks/schedule.h"
#include "cuda/device/device.h"
#include "cuda/ptx/barrier.h"

namespace dspattn::cuda::blocks {
namespace {

constexpr int kThreads = tile::kBuckets;  // one bucket each
constexpr int kClearingCtas = 16;         // of packed batches, beside the one that writes the table

struct Sequence {
  int row_tiles;
  int bucket;
};

// No row tiles past the last sequence.
__device__ __forceinline__ Sequence sequence_of(const PrepareParams& params, int shift, int index) {
  if (index >= params.sequences) return {0, 0};
  int rows = params.n_q;
  int keys = params.n_k;
  if (params.cumulative_q.present()) {
    rows = tile::packed_span(params.cumulative_q, index, params.q_rows, params.n_q).count;
    keys = tile::packed_span(params.cumulative_k, index, params.k_rows, params.n_k).count;
  }
  keys = tile::visible_keys(params.key_lengths, index, keys);
  return {(rows + params.tile_q - 1) / params.tile_q, tile::bucket_of(keys, shift)};
}

// A counting sort by buckets of lengths: how many entries a bucket has, where it begins, and the entries. Sequences of
// one bucket come in any order.
__device__ __forceinline__ void write_schedule(const PrepareParams& params, int shift) {
  __shared__ int free_entries[tile::kBuckets];  // entries of a bucket, then the next free one
  __shared__ int warp_sums[kThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31;
  const int warp = thread >> 5;
  free_entries[thread] = 0;
  const Sequence own_first = sequence_of(params, shift, thread);  // most batches have no more sequences than threads
  __syncthreads();                                                // all buckets are empty
  for (int index = thread; index < params.sequences; index += kThreads) {
    const Sequence sequence = index == thread ? own_first : sequence_of(params, shift, index);
    atomicAdd(&free_entries[sequence.bucket], sequence.row_tiles);
  }
  __syncthreads();  // all sequences are counted

  const int own = free_entries[thread];
  const auto sums_so_far = [lane](int x) {
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, x, step);
      if (lane >= step) x += before;
    }
    return x;
  };
  const int in_warp = sums_so_far(own);
  if (lane == 31) warp_sums[warp] = in_warp;
  __syncthreads();  // every warp's sum is known
  if (warp == 0) warp_sums[lane] = sums_so_far(warp_sums[lane]);
  __syncthreads();  // and what comes before it
  const int end = in_warp + (warp > 0 ? warp_sums[warp - 1] : 0);
  free_entries[thread] = end - own;
  if (thread == kThreads - 1) *params.header = {0, min(end, params.capacity)};
  __syncthreads();  // every bucket's begin is known

  // A warp writes the entries of 32 sequences, one sequence after the other.
  for (int begin = warp * 32; begin < params.sequences; begin += kThreads) {
    const Sequence sequence = begin + lane == thread ? own_first : sequence_of(params, shift, begin + lane);
    const int first = atomicAdd(&free_entries[sequence.bucket], sequence.row_tiles);
    for (int source = 0; source < min(32, params.sequences - begin); ++source) {
      const int from = __shfl_sync(~0u, first, source);
      const int to = min(from + __shfl_sync(~0u, sequence.row_tiles, source), params.capacity);
      for (int at = from + lane; at < to; at += 32) params.entries[at] = {begin + source, from};
    }
  }
}

// Rows [begin, end) of all heads, by `ctas` CTAs of which this is number `cta`.
template <typename Element>
__device__ __forceinline__ void clear_rows(const PrepareParams& params, int begin, int end, int cta, int ctas) {
  const std::int64_t rows = static_cast<std::int64_t>(end - begin) * params.heads;
#pragma unroll 1
  for (std::int64_t i = cta; i < rows; i += ctas) {
    const int head = static_cast<int>(i % params.heads);
    const std::int64_t row = begin + i / params.heads;
    auto* out = static_cast<Element*>(params.out.data) + params.out.offset(0, head, row);
    for (int column = static_cast<int>(threadIdx.x); column < params.out.columns; column += kThreads) out[column] = 0;
    if (params.lse.data != nullptr && threadIdx.x == 0) params.lse.data[params.lse.offset(0, head, row)] = -INFINITY;
  }
}

// The first CTA writes the table, the others clear. What follows on the stream may begin at once: kernels that need the
// table wait for it themselves.
__global__ void __launch_bounds__(kThreads) prepare(const PrepareParams params, int shift) {
  ptx::start_next_kernel();
  const int tables = params.header != nullptr ? 1 : 0;
  const int cta = static_cast<int>(blockIdx.x) - tables;
  if (cta < 0) return write_schedule(params, shift);
  const int clearing = static_cast<int>(gridDim.x) - tables;
  const int first = tile::clamp_length(params.cumulative_q.at(0), 0, params.q_rows);
  const int end = tile::clamp_length(params.cumulative_q.at(params.sequences), first, params.q_rows);
  if (params.out_bytes == 4) {
    clear_rows<float>(params, 0, first, cta, clearing);
    clear_rows<float>(params, end, params.q_rows, cta, clearing);
  } else {
    clear_rows<std::uint16_t>(params, 0, first, cta, clearing);
    clear_rows<std::uint16_t>(params, end, params.q_rows, cta, clearing);
  }
}

}  // namespace

void launch_prepare(const PrepareParams& params, cudaStream_t stream) {
  const int ctas = (params.header != nullptr ? 1 : 0) + (params.cumulative_q.present() ? kClearingCtas : 0);
  if (ctas == 0) return;
  launch("prepare", &prepare, {.ctas = static_cast<unsigned>(ctas), .threads = kThreads}, stream, params,
         tile::bucket_shift(params.n_k));
}

}  // namespace dspattn::cuda::blocks
