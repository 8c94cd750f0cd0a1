#include "cuda/ptx/barrier.h"
#include "cuda/sm90/fused/schedule.h"

namespace dspattn::cuda::sm90 {
namespace {

constexpr int kThreads = tile::kBuckets;  // one bucket each

struct Sequence {
  int row_tiles;
  int bucket;
};

// No row tiles past the last sequence.
__device__ __forceinline__ Sequence sequence_of(const ScheduleParams& params, int shift, int index) {
  if (index >= params.sequences) return {0, 0};
  int rows = params.n_q;
  int keys = params.n_k;
  if (params.cumulative_q != nullptr) {
    rows = min(rows, params.cumulative_q[index + 1] - params.cumulative_q[index]);
    keys = min(keys, params.cumulative_k[index + 1] - params.cumulative_k[index]);
  }
  if (params.key_lengths != nullptr) keys = min(keys, params.key_lengths[index]);
  return {(max(rows, 0) + params.tile_q - 1) / params.tile_q, tile::bucket_of(max(keys, 0), shift)};
}

// A counting sort by buckets of lengths: how many entries a bucket has, where it begins, and the entries. Sequences of
// one bucket come in any order.
__global__ void __launch_bounds__(kThreads) write_schedule(const ScheduleParams params, int shift) {
  __shared__ int places[tile::kBuckets];  // entries of a bucket, then the next free one
  __shared__ int of_warps[kThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31;
  const int warp = thread >> 5;
  ptx::start_next_kernel();  // which waits for the schedule
  places[thread] = 0;
  const Sequence own_first = sequence_of(params, shift, thread);  // most batches have no more sequences than threads
  __syncthreads();                                                // all buckets are empty
  for (int index = thread; index < params.sequences; index += kThreads) {
    const Sequence sequence = index == thread ? own_first : sequence_of(params, shift, index);
    atomicAdd(&places[sequence.bucket], sequence.row_tiles);
  }
  __syncthreads();  // all sequences are counted

  const int own = places[thread];
  const auto sums_so_far = [lane](int x) {
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, x, step);
      if (lane >= step) x += before;
    }
    return x;
  };
  const int in_warp = sums_so_far(own);
  if (lane == 31) of_warps[warp] = in_warp;
  __syncthreads();  // every warp's sum is known
  if (warp == 0) of_warps[lane] = sums_so_far(of_warps[lane]);
  __syncthreads();  // and what comes before it
  const int end = in_warp + (warp > 0 ? of_warps[warp - 1] : 0);
  places[thread] = end - own;
  if (thread == kThreads - 1) *params.header = {0, min(end, params.capacity)};
  __syncthreads();  // every bucket's begin is known

  // A warp writes the entries of 32 sequences, one sequence after the other.
  for (int begin = warp * 32; begin < params.sequences; begin += kThreads) {
    const Sequence sequence = begin + lane == thread ? own_first : sequence_of(params, shift, begin + lane);
    const int first = atomicAdd(&places[sequence.bucket], sequence.row_tiles);
    for (int of = 0; of < min(32, params.sequences - begin); ++of) {
      const int from = __shfl_sync(~0u, first, of);
      const int to = min(from + __shfl_sync(~0u, sequence.row_tiles, of), params.capacity);
      for (int at = from + lane; at < to; at += 32) params.entries[at] = {begin + of, from};
    }
  }
}

}  // namespace

cudaError_t launch_schedule(const ScheduleParams& params, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, &write_schedule, params, tile::bucket_shift(params.n_k));
}

}  // namespace dspattn::cuda::sm90
