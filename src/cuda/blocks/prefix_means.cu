// The table of means where rows see all keys before their last: those of a sequence's blocks from its first on, and of
// its first keys (tile/means.h), of plain rows of V. Under windows sums of blocks in the place of their means. A CTA
// has 64 columns of a head of a sequence, or 32 where there would be too few CTAs, and goes through its keys once.
#include "cuda/blocks/means.h"
#include "cuda/blocks/means_sequence.h"
#include "cuda/device/device.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::blocks {
namespace {

constexpr int kWidth = 8;  // columns that a thread loads at once: 16 bytes
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kSegmentKeys = tile::kBlockKeys / kWarps;  // first keys: those that a warp adds up one by one

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
  int head;

  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int lane() const { return thread() % 32; }
  __device__ __forceinline__ int warp() const { return thread() / 32; }
  __device__ __forceinline__ int column() const { return first_column + thread() % kAcross * kWidth; }
  __device__ __forceinline__ int runner() const { return thread() / kAcross; }
  __device__ __forceinline__ float& mean(std::int64_t entry, int own_column) const {
    return params.means[(head * params.table.entries + entry) * params.stride + first_column + own_column];
  }
  __device__ __forceinline__ float& sum_of_block(int block, int own_column) const {
    const std::int64_t place = head * params.table.all_blocks + params.table.block_of(sequence.place) + block;
    return params.sums[place * params.stride + first_column + own_column];
  }

  // V of the thread's columns, from its first key on; columns past the last are 0.
  __device__ __forceinline__ const std::uint16_t* own_rows() const {
    return rows + runner() * params.v.row_stride + column();
  }
  __device__ __forceinline__ uint4 load(const std::uint16_t* from) const {
    return column() < params.columns ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ static float number(std::uint32_t low_half) { return number_of<kType>(low_half); }
  __device__ __forceinline__ static void add(const uint4& x, float (&sums)[kWidth]) {
    const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[2 * i] += number(words[i]);
      sums[2 * i + 1] += number(words[i] >> 16);
    }
  }

  // Sums of eight columns over the lanes that have them: in the end of kLaneColumns each, from lane_column() on.
  __device__ __forceinline__ void over_lanes(const float (&sums)[kWidth], float (&own)[kLaneColumns]) const {
    const auto exchange = [](float keep, float give, int with) { return keep + __shfl_xor_sync(~0u, give, with); };
    const bool upper = (lane() & 16) != 0;
    const bool middle = (lane() & 8) != 0;
    float fours[4], twos[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fours[i] = exchange(upper ? sums[4 + i] : sums[i], upper ? sums[i] : sums[4 + i], 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      twos[i] = exchange(middle ? fours[2 + i] : fours[i], middle ? fours[i] : fours[2 + i], 8);
    }
    if constexpr (kLaneColumns == 2) {
      own[0] = twos[0];
      own[1] = twos[1];
    } else {
      const bool lower = (lane() & 4) != 0;
      own[0] = exchange(lower ? twos[1] : twos[0], lower ? twos[0] : twos[1], 4);
    }
  }
  __device__ __forceinline__ int lane_column() const {
    const int pair = lane() % kAcross * kWidth + (lane() >> 4 & 1) * 4 + (lane() >> 3 & 1) * 2;
    return kLaneColumns == 2 ? pair : pair + (lane() >> 2 & 1);
  }

  // A sequence without a whole block.
  __device__ __forceinline__ void average_short() const {
    for (int key = runner(); key < sequence.key_length; key += kRunners) {
      shared.first[key][thread() % kAcross] = load(own_rows() + (key - runner()) * params.v.row_stride);
    }
    average_first_keys();
  }

  // Means of blocks [0, 1), [0, 2) … of a sequence; where all rows see all keys, of the last of these alone. Under
  // windows the sum of every block (window_means.cu).
  __device__ __forceinline__ void average_blocks() const {
    const int blocks = sequence.key_length / tile::kBlockKeys;
    const bool apart = params.table.per_block > 1;
    const bool only_last = params.work.right >= tile::kMaxRows && !apart;
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
        for (int i = 0; i < kLoads; ++i) add(x[block * kLoads + i], sums);
        if (writes && (!only_last || begin + block + 1 == blocks)) {
          float own[kLaneColumns];
          over_lanes(sums, own);
#pragma unroll
          for (int i = 0; i < kLaneColumns; ++i) parts[block][warp()][lane_column() + i] = own[i];
        }
        if (apart) {
#pragma unroll
          for (float& sum : sums) sum = 0;
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
      if (apart) {
        sum_of_block(block, own_column) = sum;
      } else {
        mean(first + block, own_column) = mean_of(sum, (block + 1) * tile::kBlockKeys);
      }
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
        sums[0] += number(pair);
        sums[1] += number(pair >> 16);
      } else {
        sums[0] += number(numbers[key * kColumns + lane()]);
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
__global__ void __launch_bounds__(kThreads, 2) plain_prefix_means(const MeansParams params, const PanelTasks tasks) {
  __shared__ Shared<kColumns> shared;
  ptx::wait_for_kernels_before();
  ptx::start_next_kernel();
  const PanelTask task(tasks);
  const Sequence sequence = sequence_of(params, task.sequence);
  const PrefixCta<kType, kColumns> cta{
      {},       params, sequence, values_of<std::uint16_t>(params, sequence, task.head), shared, task.panel * kColumns,
      task.head};
  if (sequence.key_length >= tile::kBlockKeys) {
    cta.average_blocks();
  } else if (params.table.first_keys > 0) {
    cta.average_short();
  }
}

template <int kColumns>
void launch_columns(const MeansParams& params, cudaStream_t stream) {
  const PanelTasks tasks{tile::Divisor(params.heads), {}, tile::Divisor(params.stride / kColumns)};
  const auto kernel = params.type == DType::bf16 ? &plain_prefix_means<DType::bf16, kColumns>
                                                 : &plain_prefix_means<DType::f16, kColumns>;
  launch("the means of V", kernel,
         {.ctas = grid_of(tasks.count(params.sequences)), .threads = kThreads, .may_overlap = true}, stream, params,
         tasks);
}

// From so many on 64 columns were measured faster (n = 1024); 32 CTAs of them, n = 16384, were slower than twice as
// many.
constexpr std::int64_t kEnoughCtas = 512;

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

}  // namespace dspattn::cuda::blocks
