#include <cmath>

#include "cuda/blocks/means.h"
#include "cuda/blocks/means_sequence.h"
#include "cuda/device/device.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::blocks {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;       // columns of V that a thread loads at once: 16 bytes
constexpr int kRowsOfCta = 64;  // query rows whose means a CTA of masked_means() computes
constexpr int kMostColumns = 512;

// V of one head of a sequence, and which of its keys no mask hides.
struct Values {
  const MeansParams& params;
  const std::uint8_t* rows;
  int element_bytes;
  int sequence_index;
  std::int64_t allowed, bias;  // elements of the masks at key 0

  __device__ __forceinline__ Values(const MeansParams& p, const Sequence& sequence, int head)
      : params(p), element_bytes(p.type == DType::f32 ? 4 : 2), sequence_index(sequence.place.index) {
    rows = static_cast<const std::uint8_t*>(p.v.data) + p.v.offset(p.pages.table != nullptr ? 0 : sequence.batch,
                                                                   p.heads_per_key_head.quotient(head),
                                                                   sequence.place.k_row) *
                                                            element_bytes;
    allowed = sequence.place.index * p.allowed.batch_stride + head * p.allowed.head_stride;
    bias = sequence.place.index * p.bias.batch_stride + head * p.bias.head_stride;
  }

  // Of a key that is not hidden, from a column on.
  __device__ __forceinline__ const std::uint8_t* row(int key, int column) const {
    std::int64_t offset = key * params.v.row_stride + column;
    if (params.pages.table != nullptr) {
      offset = params.pages.page_of(sequence_index, key) * params.v.batch_stride +
               params.pages.size.remainder(key) * params.v.row_stride + column;
    }
    return rows + offset * element_bytes;
  }

  __device__ __forceinline__ bool hidden(int key) const {
    if (params.pages.table != nullptr && params.pages.page_of(sequence_index, key) < 0) return true;
    if (params.allowed.data != nullptr &&
        static_cast<const std::uint8_t*>(params.allowed.data)[allowed + key * params.allowed.key_stride] == 0) {
      return true;
    }
    if (params.bias.data == nullptr) return false;
    const std::int64_t at = bias + key * params.bias.key_stride;
    if (params.bias_bytes == 4) return static_cast<const float*>(params.bias.data)[at] == -INFINITY;
    const std::uint16_t bits = static_cast<const std::uint16_t*>(params.bias.data)[at];
    return bits == (params.type == DType::bf16 ? 0xFF80u : 0xFC00u);
  }

  __device__ __forceinline__ float number(std::uint32_t low_half) const {
    if (params.type == DType::bf16) return __uint_as_float(low_half << 16);
    float low, high;
    ptx::unpack_f16x2(low_half & 0xFFFFu, low, high);
    return low;
  }
  // One column; 0 past the last.
  __device__ __forceinline__ float at(int key, int column) const {
    return column < params.columns ? element(row(key, column)) : 0.0f;
  }
  __device__ __forceinline__ float element(const std::uint8_t* at) const {
    if (params.type == DType::f32) return *reinterpret_cast<const float*>(at);
    return number(*reinterpret_cast<const std::uint16_t*>(at));
  }
  __device__ __forceinline__ void add(const uint4& x, float (&sums)[kWidth]) const {
    const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[2 * i] += number(words[i]);
      sums[2 * i + 1] += number(words[i] >> 16);
    }
  }
  // Adds kWidth columns from `column` on to `sums`.
  __device__ __forceinline__ void add(int key, int column, float (&sums)[kWidth]) const {
    if (column >= params.columns) return;
    const std::uint8_t* from = row(key, column);
    if (params.vector != 0 && params.type != DType::f32) {
      add(*reinterpret_cast<const uint4*>(from), sums);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (column + i < params.columns) sums[i] += element(from + i * element_bytes);
      }
    }
  }
};

// How the threads of sum_blocks() share a block of 128 keys: each has kWidth columns of some neighbouring keys, its
// run.
struct BlockShare {
  int column, run, runs, keys;

  __device__ __forceinline__ explicit BlockShare(int stride) {
    const int across = stride / kWidth;
    runs = kThreads / across;
    keys = tile::kBlockKeys / runs;
    column = static_cast<int>(threadIdx.x) % across * kWidth;
    run = static_cast<int>(threadIdx.x) / across;
  }
};

struct RunSums {
  float sums[kThreads * kWidth];  // [run][column]
  int counts[kThreads];           // of the run's keys that no mask hides
};

// Adds up every run of keys [0, length) of `values`, of which there are at most 128.
__device__ __forceinline__ void add_runs(const Values& values, const BlockShare& share, int first_key, int length,
                                         RunSums& runs) {
  float sums[kWidth] = {};
  int count = 0;
  for (int i = 0; i < share.keys; ++i) {
    const int key = share.run * share.keys + i;
    if (key < length && !values.hidden(first_key + key)) {
      values.add(first_key + key, share.column, sums);
      ++count;
    }
  }
  float* to = runs.sums + static_cast<int>(threadIdx.x) * kWidth;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) to[i] = sums[i];
  if (share.column == 0) runs.counts[share.run] = count;
  __syncthreads();  // every run's sum is known to all
}

// The whole block at place `block` of the head's.
__device__ __forceinline__ void sum_block(const MeansParams& params, int head, std::int64_t block, RunSums& runs) {
  int index = 0;
  if (params.work.cumulative_k.present()) {
    // The last sequence that begins at or before the block's place: no other can have a block there.
    for (int low = 0, high = params.sequences; low < high;) {
      const int middle = (low + high) / 2;
      const int begin = tile::clamp_length(params.work.cumulative_k.at(middle), 0, params.work.k_rows);
      if (begin / tile::kBlockKeys <= block) {
        index = middle;
        low = middle + 1;
      } else {
        high = middle;
      }
    }
  } else {
    index = static_cast<int>(block / params.table.blocks);
  }
  const Sequence sequence = sequence_of(params, index);
  const std::int64_t rank = block - params.table.block_of(sequence.place);
  if (rank < 0 || (rank + 1) * tile::kBlockKeys > sequence.key_length) return;
  const BlockShare share(params.stride);
  add_runs(Values(params, sequence, head), share, static_cast<int>(rank) * tile::kBlockKeys, tile::kBlockKeys, runs);
  const std::int64_t place = head * params.table.all_blocks + block;
  for (int column = static_cast<int>(threadIdx.x); column < params.stride; column += kThreads) {
    float sum = 0;
    for (int run = 0; run < share.runs; ++run) sum += runs.sums[run * params.stride + column];
    params.sums[place * params.stride + column] = sum;
  }
  if (threadIdx.x == 0) {
    int count = 0;
    for (int run = 0; run < share.runs; ++run) count += runs.counts[run];
    params.counts[place] = count;
  }
}

// The means of a sequence's first keys, up to 127 of them.
__device__ __forceinline__ void average_first_keys(const MeansParams& params, int head, int index, RunSums& runs) {
  const Sequence sequence = sequence_of(params, index);
  const int length = min(sequence.key_length, params.table.first_keys);
  const BlockShare share(params.stride);
  const Values values(params, sequence, head);
  add_runs(values, share, 0, length, runs);
  float sums[kWidth] = {};
  int count = 0;
  for (int run = 0; run < share.run; ++run) {
    const float* from = runs.sums + run * params.stride + share.column;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[i] += from[i];
    count += runs.counts[run];
  }
  float* to = params.means + (head * params.table.entries + params.table.edge_of(sequence.place)) * params.stride;
  for (int i = 0; i < share.keys; ++i) {
    const int key = share.run * share.keys + i;
    if (key >= length) return;
    if (!values.hidden(key)) {
      values.add(key, share.column, sums);
      ++count;
    }
    auto* entry = reinterpret_cast<float4*>(to + static_cast<std::int64_t>(key) * params.stride + share.column);
    entry[0] =
        make_float4(mean_of(sums[0], count), mean_of(sums[1], count), mean_of(sums[2], count), mean_of(sums[3], count));
    entry[1] =
        make_float4(mean_of(sums[4], count), mean_of(sums[5], count), mean_of(sums[6], count), mean_of(sums[7], count));
  }
}

// A CTA for every whole block of a head, and one for the first keys of each of its sequences. From the last sequence to
// the first, whose V the kernel that follows then finds in the L2 cache.
__global__ void __launch_bounds__(kThreads) sum_blocks(const MeansParams params) {
  __shared__ RunSums runs;
  ptx::start_next_kernel();
  const unsigned task = gridDim.x - 1 - blockIdx.x;
  const auto heads = static_cast<unsigned>(params.heads);
  const auto head = static_cast<int>(task % heads);
  const std::int64_t rank = task / heads;
  if (rank < params.table.all_blocks) {
    sum_block(params, head, rank, runs);
  } else {
    average_first_keys(params, head, static_cast<int>(rank - params.table.all_blocks), runs);
  }
}

// Sums of blocks [first, last) of a sequence, whose block 0 stands at `place`, and of how many keys.
struct Total {
  float sum = 0;
  int count = 0;

  __device__ __forceinline__ void add(const MeansParams& params, std::int64_t place, int column) {
    sum += params.sums[place * params.stride + column];
    count += params.counts[place];
  }
};

// Rows see all keys before their last: the means of the blocks from a sequence's first on. A CTA for every head of a
// sequence, a thread for every column.
__global__ void __launch_bounds__(kMostColumns) prefix_means(const MeansParams params) {
  ptx::start_next_kernel();
  ptx::wait_for_kernels_before();
  const int head = static_cast<int>(blockIdx.x) / params.sequences;
  const Sequence sequence = sequence_of(params, static_cast<int>(blockIdx.x) - head * params.sequences);
  const int column = static_cast<int>(threadIdx.x);
  const std::int64_t place = head * params.table.all_blocks + params.table.block_of(sequence.place);
  const std::int64_t first = head * params.table.entries + params.table.entry_of_blocks(sequence.place, {0, 1});
  const int blocks = sequence.key_length / tile::kBlockKeys;
  constexpr int kBatch = 8;  // loaded before the first is stored: the compiler does not know that they are others
  Total total;
  for (int begin = 0; begin < blocks; begin += kBatch) {
    float sums[kBatch];
    int counts[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::int64_t at = place + min(begin + i, blocks - 1);
      sums[i] = params.sums[at * params.stride + column];
      counts[i] = params.counts[at];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (begin + i >= blocks) break;
      total.sum += sums[i];
      total.count += counts[i];
      params.means[(first + begin + i) * params.stride + column] = mean_of(total.sum, total.count);
    }
  }
}

// One column of V, as a thread of masked_means() has it.
struct RowColumn {
  const MeansParams& params;
  const Sequence& sequence;
  tile::RowBand band;
  Values values;
  int head, column;

  __device__ __forceinline__ float& mean(std::int64_t entry) const {
    return params.means[(head * params.table.entries + entry) * params.stride + column];
  }
  __device__ __forceinline__ void add(int key, Total& total) const {
    if (values.hidden(key)) return;
    total.sum += values.at(key, column);
    ++total.count;
  }

  // Rows [begin, end) where mask tensors hide keys: of whole blocks those that are not hidden, or of all keys, where
  // that leaves none.
  __device__ __forceinline__ void average(int begin, int end) const {
    const std::int64_t place = head * params.table.all_blocks + params.table.block_of(sequence.place);
    tile::KeyBlockRange last;
    Total blocks;
    for (int row = begin; row < end; ++row) {
      const tile::KeyInterval keys = tile::interval_of(band, row);
      if (keys.end <= keys.begin) continue;
      const tile::KeyBlockRange whole = tile::whole_blocks(keys);
      if (row == begin || whole.begin != last.begin || whole.end != last.end) {
        blocks = {};
        for (int block = whole.begin; block < whole.end; ++block) blocks.add(params, place + block, column);
        last = whole;
      }
      Total total = blocks;
      if (total.count == 0) {
        for (int key = keys.begin; key < keys.end; ++key) add(key, total);
      }
      mean(params.table.entry_of_row(sequence.place, row)) = mean_of(total.sum, total.count);
    }
  }
};

// A CTA for every kRowsOfCta rows of a head of a sequence, a thread for every column. Without the second bound ptxas
// keeps to 40 registers, and spills.
__global__ void __launch_bounds__(kMostColumns, 2) masked_means(const MeansParams params, int chunks) {
  ptx::start_next_kernel();
  ptx::wait_for_kernels_before();
  const auto chunk = static_cast<int>(blockIdx.x % chunks);
  const auto sequence_head = static_cast<int>(blockIdx.x / chunks);
  const int head = sequence_head / params.sequences;
  const Sequence sequence = sequence_of(params, sequence_head - head * params.sequences);
  const RowColumn column{params,
                         sequence,
                         band_of(params.work, sequence),
                         Values(params, sequence, head),
                         head,
                         static_cast<int>(threadIdx.x)};
  column.average(chunk * kRowsOfCta, min(sequence.rows, (chunk + 1) * kRowsOfCta));
}

}  // namespace

void launch_means(const MeansParams& params, cudaStream_t stream) {
  const tile::MeanTable& table = params.table;
  const bool masked = table.all_rows != 0;
  if (!masked && table.by_row != 0) return launch_row_means(params, stream);
  const std::int64_t tasks = table.all_blocks + (table.first_keys > 0 ? params.sequences : 0);
  const bool plain = !masked && has_plain_rows(params);
  if (plain) {
    launch_plain_prefix_means(params, stream);
  } else if (tasks > 0) {
    launch("the sums of V", &sum_blocks, {.ctas = grid_of(tasks * params.heads), .threads = kThreads}, stream, params);
  }
  const std::int64_t sequence_heads = std::int64_t{params.heads} * params.sequences;
  LaunchShape shape{.threads = params.stride, .may_overlap = tasks > 0};
  if (masked) {
    const int chunks = tile::divide_up(params.work.n_q, kRowsOfCta);
    shape.ctas = grid_of(sequence_heads * chunks);
    launch("the means of V by rows", &masked_means, shape, stream, params, chunks);
  } else if (table.per_block > 1) {
    launch_window_means(params, stream);
  } else if (!plain && table.all_blocks > 0) {
    shape.ctas = grid_of(sequence_heads);
    launch("the means of V", &prefix_means, shape, stream, params);
  }
}

}  // namespace dspattn::cuda::blocks
