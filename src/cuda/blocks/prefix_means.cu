// The table of means where rows see all keys before their last: those of a sequence's blocks from its first on, and of
// its first keys (tile/means.h), of plain rows of V. A CTA has 64 columns of a head of a sequence, or 32 where there
// would be too few CTAs, and goes through its keys once.
#include "cuda/blocks/means.h"
#include "cuda/blocks/means_columns.h"
#include "cuda/blocks/means_sequence.h"
#include "cuda/device/device.h"
#include "cuda/ptx/barrier.h"

namespace dspattn::cuda::blocks {
namespace {

constexpr int kWidth = kLoadedColumns;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
static_assert(kSegmentKeys * kWarps == tile::kBlockKeys, "of the first keys a warp adds up a segment one by one");

// kColumns: 32 are what memory delivers at once; with 64, a whole line, means of first keys take three quarters of the
// time (docs/log/rest.md).
template <int kColumns>
struct Shares {
  static constexpr int kAcross = kColumns / kWidth;
  static constexpr int kRunners = kThreads / kAcross;         // threads that share a column
  static constexpr int kLoads = tile::kBlockKeys / kRunners;  // keys of a block that a thread adds up
  static constexpr int kBatch = kThreads / kColumns;          // blocks whose V is loaded together: a thread an entry
  static constexpr int kLaneColumns = kColumns / 32;          // of means that a lane writes side by side
};

template <int kColumns>
struct Shared : Shares<kColumns> {
  using Shares<kColumns>::kBatch, Shares<kColumns>::kAcross, Shares<kColumns>::kLaneColumns;
  float sums[2][kBatch][kWarps][kColumns];  // of two batches: a warp's share of the sum of all keys so far
  uint4 first[tile::kBlockKeys][kAcross];   // V of the first block
  float segments[kWarps][kColumns];
};

template <DType kType, int kColumns>
struct PrefixCta : Shares<kColumns> {
  using Shares<kColumns>::kAcross, Shares<kColumns>::kRunners, Shares<kColumns>::kLoads, Shares<kColumns>::kBatch,
      Shares<kColumns>::kLaneColumns;
  const MeansParams& params;
  const Sequence& sequence;
  const std::uint16_t* rows;  // of V
  Shared<kColumns>& shared;
  int first_column;
  std::int64_t head_entries;  // of the table, before those of this head

  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int lane() const { return thread() % 32; }
  __device__ __forceinline__ int warp() const { return thread() / 32; }
  __device__ __forceinline__ int column() const { return first_column + thread() % kAcross * kWidth; }
  __device__ __forceinline__ int runner() const { return thread() / kAcross; }
  __device__ __forceinline__ float& mean(std::int64_t entry, int own_column) const {
    return params.means[(head_entries + entry) * params.stride + first_column + own_column];
  }

  // V of the thread's columns, from its first key on; columns past the last are 0.
  __device__ __forceinline__ const std::uint16_t* own_rows() const {
    return rows + runner() * params.v.row_stride + column();
  }
  __device__ __forceinline__ uint4 load(const std::uint16_t* from) const {
    return column() < params.columns ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  }
  // A sequence without a whole block.
  __device__ __forceinline__ void average_short() const {
    for (int key = runner(); key < sequence.key_length; key += kRunners) {
      shared.first[key][thread() % kAcross] = load(own_rows() + (key - runner()) * params.v.row_stride);
    }
    average_first_keys();
  }

  // Means of blocks [0, 1), [0, 2) … of a sequence; where all rows see all keys, of the last of these alone.
  __device__ __forceinline__ void average_blocks() const {
    const int blocks = sequence.key_length / tile::kBlockKeys;
    const bool only_last = params.work.right >= tile::kMaxRows;
    const std::int64_t first = params.table.entry_of_blocks(sequence.place, {0, 1});
    const std::int64_t step = kRunners * params.v.row_stride;
    const std::uint16_t* from = own_rows();
    float sums[kWidth] = {};
#pragma unroll 1
    for (int begin = 0; begin < blocks; begin += kBatch) {
      uint4 x[kBatch * kLoads];
#pragma unroll
      for (int i = 0; i < kBatch * kLoads; ++i) {
        x[i] = begin + i / kLoads < blocks ? load(from) : make_uint4(0, 0, 0, 0);
        from += step;
      }
      if (begin == 0 && params.table.first_keys > 0) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) shared.first[i * kRunners + runner()][thread() % kAcross] = x[i];
        average_first_keys();
      }
      auto& parts = shared.sums[begin / kBatch & 1];
      const bool writes = !only_last || begin + kBatch >= blocks;
#pragma unroll
      for (int block = 0; block < kBatch; ++block) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) add_columns<kType>(x[block * kLoads + i], sums);
        if (writes && (!only_last || begin + block + 1 == blocks)) {
          float own[kLaneColumns];
          sum_over_lanes<kLaneColumns>(sums, lane(), own);
#pragma unroll
          for (int i = 0; i < kLaneColumns; ++i) parts[block][warp()][lane_column<kLaneColumns>(lane()) + i] = own[i];
        }
      }
      if (!writes) continue;
      __syncthreads();  // all warps' parts are known; those of the batch before are read
      const int entry = thread() / kColumns, own_column = thread() % kColumns;
      const int block = begin + entry;
      if (block >= blocks || (only_last && block + 1 < blocks)) continue;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += parts[entry][i][own_column];
      mean(first + block, own_column) = mean_of(sum, (block + 1) * tile::kBlockKeys);
    }
  }

  // Means of a sequence's first keys, up to 127 of them, whose V is in shared memory.
  __device__ __forceinline__ void average_first_keys() const {
    const int length = min(sequence.key_length, params.table.first_keys);
    __syncthreads();  // it is there
    const auto* numbers = reinterpret_cast<const std::uint16_t*>(shared.first);
    const int own_column = lane() * kLaneColumns;
    const int begin = warp() * kSegmentKeys;
    const int end = min(length, begin + kSegmentKeys);
    float sums[kLaneColumns] = {};
    const auto add_key = [&](int key) {
      if constexpr (kLaneColumns == 2) {
        const std::uint32_t pair = reinterpret_cast<const std::uint32_t*>(numbers)[key * 32 + lane()];
        sums[0] += number_of<kType>(pair);
        sums[1] += number_of<kType>(pair >> 16);
      } else {
        sums[0] += number_of<kType>(numbers[key * kColumns + lane()]);
      }
    };
    for (int key = begin; key < end; ++key) add_key(key);
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) shared.segments[warp()][own_column + i] = sums[i];
    __syncthreads();  // all segments' sums are known
#pragma unroll
    for (float& sum : sums) sum = 0;
    for (int before = 0; before < warp(); ++before) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) sums[i] += shared.segments[before][own_column + i];
    }
    for (int key = begin; key < end; ++key) {
      add_key(key);
      float* to = &mean(params.table.edge_of(sequence.place) + key, own_column);
      if constexpr (kLaneColumns == 2) {
        *reinterpret_cast<float2*>(to) = make_float2(mean_of(sums[0], key + 1), mean_of(sums[1], key + 1));
      } else {
        *to = mean_of(sums[0], key + 1);
      }
    }
  }
};

template <DType kType, int kColumns>
__global__ void __launch_bounds__(kThreads, 2) plain_prefix_means(const MeansParams params) {
  __shared__ Shared<kColumns> shared;
  ptx::wait_for_kernels_before();
  ptx::start_next_kernel();
  // From the last sequence to the first, whose V the kernel that follows then finds in the L2 cache.
  const auto task = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int panels = params.stride / kColumns;
  const int sequence_head = task / panels;
  const int index = sequence_head / params.heads;
  const int head = sequence_head - index * params.heads;
  const Sequence sequence = sequence_of(params, index);
  const auto* rows = static_cast<const std::uint16_t*>(params.v.data) +
                     params.v.offset(sequence.batch, params.heads_per_key_head.quotient(head), sequence.place.k_row);
  const PrefixCta<kType, kColumns> cta{
      {}, params, sequence, rows, shared, (task - sequence_head * panels) * kColumns, head * params.table.entries};
  if (sequence.key_length >= tile::kBlockKeys) {
    cta.average_blocks();
  } else if (params.table.first_keys > 0) {
    cta.average_short();
  }
}

template <int kColumns>
void launch_columns(const MeansParams& params, cudaStream_t stream) {
  const std::int64_t ctas = std::int64_t{params.heads} * params.sequences * (params.stride / kColumns);
  const auto kernel = params.type == DType::bf16 ? &plain_prefix_means<DType::bf16, kColumns>
                                                 : &plain_prefix_means<DType::f16, kColumns>;
  launch("the means of V", kernel, {.ctas = grid_of(ctas), .threads = kThreads, .may_overlap = true}, stream, params);
}

// From so many on 64 columns were measured faster (n = 1024); 32 CTAs of them, n = 16384, were slower than twice as
// many.
constexpr std::int64_t kEnoughCtas = 512;

__global__ void __launch_bounds__(kThreads) clear_counts(std::int32_t* counts, int count) {
  ptx::wait_for_kernels_before();
  ptx::start_next_kernel();
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) counts[i] = 0;
}

}  // namespace

bool has_plain_rows(const MeansParams& params) {
  return params.type != DType::f32 && params.vector != 0 && params.pages.table == nullptr && params.stride % 32 == 0;
}

void launch_plain_prefix_means(const MeansParams& params, cudaStream_t stream) {
  const std::int64_t wide = std::int64_t{params.heads} * params.sequences * (params.stride / 64);
  if (params.stride % 64 == 0 && wide >= kEnoughCtas) {
    launch_columns<64>(params, stream);
  } else {
    launch_columns<32>(params, stream);
  }
}

void launch_own_means(const OwnMeans& own, std::size_t count_bytes, cudaStream_t stream) {
  launch("clear_counts", &clear_counts, {.threads = kThreads, .may_overlap = true}, stream, own.counts,
         static_cast<int>(count_bytes / sizeof(std::int32_t)));
}

}  // namespace dspattn::cuda::blocks
