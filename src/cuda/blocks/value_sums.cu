// Sums of V over blocks of 128 keys, then over all blocks up to each. A warp adds up 32 columns of a block, its lanes a
// column each, key by key. After a step of generation at most one block is new, and one CTA a key head does both; after
// a prompt many CTAs share the blocks and a second kernel adds these up. Always in the same order.
#include "cuda/blocks/value_sums.h"
#include "cuda/blocks/values.h"
#include "cuda/device/device.h"
#include "cuda/tile/value_sums.h"

namespace dspattn::cuda::blocks {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kKeysAtOnce = 16;   // whose V a lane loads together
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

// A column of a block: its sum; past the last column how many keys it has.
__device__ __forceinline__ float sum_of_block(const HeadValues& values, int block, int column) {
  float sum = 0;
  for (int first = block * tile::kBlockKeys; first < (block + 1) * tile::kBlockKeys; first += kKeysAtOnce) {
    float x[kKeysAtOnce];
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      const std::int64_t row = values.row(first + i);
      x[i] = row < 0 ? 0.0f : column < values.values.columns ? values.at(row + column) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) sum += x[i];
  }
  return sum;
}

__device__ __forceinline__ void sum_blocks(const ValueSumsParams& p, const Task& task, int chunk) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const HeadValues values(p.values, task.sequence, task.head);
  const int across = (p.values.columns + 1 + 31) / 32;
  const int items = (task.blocks.end - task.blocks.begin) * across;
  for (int item = chunk * kWarps + warp; item < items; item += p.chunks.value * kWarps) {
    const int block = task.blocks.begin + item / across, column = item % across * 32 + lane;
    if (column > p.values.columns) continue;
    p.sums.data[p.sums.offset(task.sequence, task.head, tile::row_of_block(block)) + column] =
        sum_of_block(values, block, column);
  }
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

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ ValueSumsParams p) {
  const int index = p.chunks.quotient(static_cast<int>(blockIdx.x));
  const Task task(p, index);
  sum_blocks(p, task, static_cast<int>(blockIdx.x) - index * p.chunks.value);
  if (p.chunks.value > 1) return;
  __syncthreads();  // the blocks' sums are there
  add_up_blocks(p, task);
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
