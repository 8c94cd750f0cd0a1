// Sums of V over blocks of 128 keys, then over all blocks up to each. A CTA adds up a block: a thread has eight columns
// of some of its keys, its run, and the runs are added in shared memory. After a step of generation at most one block
// is new, and one CTA a key head does both; after a prompt there is a CTA a block, and a second kernel adds up blocks.
// Always in the same order.
#include "cuda/blocks/value_sums.h"
#include "cuda/blocks/values.h"
#include "cuda/device/device.h"
#include "cuda/tile/value_sums.h"

namespace dspattn::cuda::blocks {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;         // columns of a thread: 16 bytes of 16-bit numbers
constexpr int kKeysAtOnce = 8;    // whose V a thread loads together
constexpr int kBlocksAtOnce = 8;  // whose sums a thread loads together

// A key head of a sequence, and its blocks that are to be added up.
struct Task {
  int sequence, head;
  tile::KeyBlockRange blocks;

  __device__ __forceinline__ Task(const ValueSumsParams& p, int index)
      : sequence(p.heads.quotient(index)), head(index - sequence * p.heads.value) {
    blocks = tile::blocks_to_sum(tile::visible_keys(p.key_lengths, sequence, p.n_k), p.new_keys);
  }
};

struct RunSums {
  float sums[kThreads * kWidth];  // [run][column]
  int counts[kThreads];           // of the run's keys
};

// A thread's columns of the keys first, first + step, ..., kKeysAtOnce of them, those before `end`. Returns how many.
__device__ __forceinline__ int add_keys(const ValueSumsParams& p, const HeadValues& values, int first, int step,
                                        int end, int column, float (&sums)[kWidth]) {
  std::int64_t rows[kKeysAtOnce];
  int count = 0;
#pragma unroll
  for (int i = 0; i < kKeysAtOnce; ++i) {
    rows[i] = first + i * step < end ? values.row(first + i * step) : -1;
    count += rows[i] >= 0 ? 1 : 0;
  }
  if (p.vector != 0) {
    uint4 x[kKeysAtOnce];
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      x[i] = make_uint4(0, 0, 0, 0);
      if (rows[i] >= 0) {
        x[i] =
            *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.values.rows.data) + rows[i] + column);
      }
    }
#pragma unroll
    for (const uint4& eight : x) {
      const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int c = 0; c < kWidth; ++c) sums[c] += values.number(words[c / 2] >> (16 * (c % 2)));
    }
    return count;
  }
  for (int i = 0; i < kKeysAtOnce; ++i) {
    for (int c = 0; c < kWidth && rows[i] >= 0; ++c) {
      if (column + c < p.values.columns) sums[c] += values.at(rows[i] + column + c);
    }
  }
  return count;
}

// By all of a CTA's threads.
__device__ __forceinline__ void sum_block(const ValueSumsParams& p, const Task& task, int block, RunSums& shared) {
  const int columns = p.values.columns, across = (columns + kWidth - 1) / kWidth;
  const int runs = min(kThreads / across, tile::kBlockKeys);
  const auto thread = static_cast<int>(threadIdx.x);
  const int run = thread / across, column = thread % across * kWidth;
  const HeadValues values(p.values, task.sequence, task.head);
  if (run < runs) {
    float sums[kWidth] = {};
    int count = 0;
    const int begin = block * tile::kBlockKeys, end = begin + tile::kBlockKeys;
#pragma unroll 1
    for (int key = begin + run; key < end; key += kKeysAtOnce * runs) {
      count += add_keys(p, values, key, runs, end, column, sums);
    }
#pragma unroll
    for (int c = 0; c < kWidth; ++c) shared.sums[run * across * kWidth + column + c] = sums[c];
    if (column == 0) shared.counts[run] = count;
  }
  __syncthreads();  // every run's sums are there
  float* to = p.sums.data + p.sums.offset(task.sequence, task.head, tile::row_of_block(block));
  for (int c = thread; c <= columns; c += kThreads) {
    float sum = 0;
    for (int i = 0; i < runs; ++i) {
      sum += c < columns ? shared.sums[i * across * kWidth + c] : static_cast<float>(shared.counts[i]);
    }
    to[c] = sum;
  }
  __syncthreads();  // and have been read; this block's are written
}

__device__ __forceinline__ void add_up_blocks(const ValueSumsParams& p, const Task& task) {
  for (int column = static_cast<int>(threadIdx.x); column <= p.values.columns; column += kThreads) {
    float* sums = p.sums.data + p.sums.offset(task.sequence, task.head, 0) + column;
    const auto at = [&](int row) { return sums + row * p.sums.row_stride; };
    float total = task.blocks.begin > 0 ? *at(tile::row_of_blocks_to(task.blocks.begin - 1)) : 0.0f;
    for (int first = task.blocks.begin; first < task.blocks.end; first += kBlocksAtOnce) {
      float x[kBlocksAtOnce];
#pragma unroll
      for (int i = 0; i < kBlocksAtOnce; ++i) {
        x[i] = first + i < task.blocks.end ? *at(tile::row_of_block(first + i)) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kBlocksAtOnce; ++i) {
        total += x[i];
        if (first + i < task.blocks.end) *at(tile::row_of_blocks_to(first + i)) = total;
      }
    }
  }
}

// The second bound keeps ptxas from spilling for an occupancy that nothing here needs.
__global__ void __launch_bounds__(kThreads, 1) sum_kernel(const __grid_constant__ ValueSumsParams p) {
  __shared__ RunSums shared;
  const int index = p.chunks.quotient(static_cast<int>(blockIdx.x));
  const Task task(p, index);
  const int first = task.blocks.begin + static_cast<int>(blockIdx.x) - index * p.chunks.value;
  for (int block = first; block < task.blocks.end; block += p.chunks.value) sum_block(p, task, block, shared);
  if (p.chunks.value == 1) add_up_blocks(p, task);
}

__global__ void __launch_bounds__(kThreads) add_up_kernel(const __grid_constant__ ValueSumsParams p) {
  add_up_blocks(p, Task(p, static_cast<int>(blockIdx.x)));
}

}  // namespace

void launch_value_sums(const ValueSumsParams& params, int sequences, cudaStream_t stream) {
  const std::int64_t tasks = std::int64_t{sequences} * params.heads.value;
  launch("the sums of V", sum_kernel, {.ctas = grid_of(tasks * params.chunks.value), .threads = kThreads}, stream,
         params);
  if (params.chunks.value == 1) return;
  launch("the sums of V so far", add_up_kernel, {.ctas = grid_of(tasks), .threads = kThreads}, stream, params);
}

}  // namespace dspattn::cuda::blocks
