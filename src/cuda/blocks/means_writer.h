// Writes the table of means of V (tile/means.h) inside the kernel that reads it, by warps that would otherwise wait.
//
// A warp takes tasks (tile::MeanTasks) from a counter, in the order in which items need their heads, and waits for
// nobody in between: what a consumer waits for was taken by a warp at work, or will be by one of its own CTA. So
// nothing is asked of how many CTAs run at once, and a CTA that runs alone writes the whole table. A warp that has
// another duty looks after it between tasks (work_until), and waits for it only when no task is left.
//
// Additions have the order that they have in prefix_means.cu with 64 columns a CTA: a task is there a warp of the CTA.
#pragma once

#include <cstdint>

#include "cuda/blocks/barriers.h"
#include "cuda/blocks/means_columns.h"
#include "cuda/blocks/means_params.h"
#include "cuda/blocks/views.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/ordered_sums.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/prefetch.h"

namespace dspattn::cuda::blocks {

// Which rows there may be: where all see all keys there is one mean of a head, and less code.
enum class RowsSee : std::uint8_t { all_keys, anything };

// kInFlight: loads of 16 bytes that a thread has registers for.
template <DType kType, int kInFlight, RowsSee kRows>
struct MeansWriter {
  static constexpr int kWordsInFlight = 8;
  static constexpr int kRowsAtOnce = 4;  // of 64 columns: what a warp loads together
  static constexpr int kLoads = tile::kBlockKeys / tile::kKeyShares / kRowsAtOnce;  // of a block, for a share
  static_assert(kLoads % kInFlight == 0 && kSegmentKeys % kWordsInFlight == 0);

  const OwnMeans& own;
  const MeansView& view;
  const RowsView& v;
  int columns;  // d_v
  int stride;   // floats of an entry
  int next;     // task, as lane 0 knows it

  __device__ __forceinline__ MeansWriter(const OwnMeans& own_means, const MeansView& means, const RowsView& rows,
                                         int d_v, int entry_columns)
      : own(own_means), view(means), v(rows), columns(d_v), stride(entry_columns), next(0) {
    if (own.counts == nullptr) return;  // no tasks
    ptx::wait_for_kernels_before();     // counts are 0
    next = take();
  }

  // Means of a sequence's first blocks and keys.
  __device__ __forceinline__ bool prefixes() const { return kRows == RowsSee::anything && own.tasks.first_keys != 0; }
  // Opaque: nothing made of it is kept from task to task, registers are few.
  __device__ __forceinline__ static int lane() { return ptx::opaque(static_cast<int>(threadIdx.x & 31)); }
  __device__ __forceinline__ int take() const { return lane() == 0 ? atomicAdd(own.taken(), 1) : 0; }

  __device__ __forceinline__ const std::uint16_t* rows_of(const tile::MeanTask& task) const {
    return static_cast<const std::uint16_t*>(v.data) + v.offset(task.sequence, task.head, 0) +
           task.panel * tile::kTaskColumns;
  }
  __device__ __forceinline__ float* entry(const tile::MeanTask& task, int number) const {
    return own.means + (task.head * view.table.entries + number) * stride + task.panel * tile::kTaskColumns;
  }
  __device__ __forceinline__ float* sums_of(const tile::MeanTask& task) const {
    return own.sums + own.tasks.sums_of(own.tasks.group(task.sequence, task.head), task.panel);
  }

  // Asks for V of the task that comes next, of which a warp would otherwise wait for a few rows at a time.
  __device__ __forceinline__ void prefetch(int index) const {
    if (index >= own.tasks.count) return;
    const tile::MeanTask task = own.tasks.at(index);
    if (task.panel * tile::kTaskColumns >= columns) return;
    const bool first_keys = prefixes() && task.share < 0;
    const std::uint16_t* rows = rows_of(task);
    const int count = first_keys ? tile::kBlockKeys : own.tasks.blocks * (tile::kBlockKeys / tile::kKeyShares);
#pragma unroll 1
    for (int i = lane(); i < count; i += 32) {
      constexpr int kStep = tile::kBlockKeys / kLoads;
      const int of_share = i / kRowsAtOnce * kStep + task.share * kRowsAtOnce + i % kRowsAtOnce;
      ptx::prefetch_to_l2(rows + (first_keys ? i : of_share) * v.row_stride);
    }
  }

  // A share of the keys of every block: rows r, r + 32 ... of it for every r of four.
  __device__ __forceinline__ void add_share(const tile::MeanTask& task) const {
    const int own_lane = lane();
    const int column = own_lane % 8 * kLoadedColumns;
    const bool present = task.panel * tile::kTaskColumns + column < columns;
    const int first_row = task.share * kRowsAtOnce + own_lane / 8;
    const std::int64_t step = (tile::kBlockKeys / kLoads) * v.row_stride;
    const std::uint16_t* from = rows_of(task) + first_row * v.row_stride + column;
    const auto load = [&] {
      const uint4 x = present ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      from += step;
      return x;
    };
    // Loads of the next block are on their way while this one's are added up: half of them before its sums go over the
    // lanes, for which registers would be too few beside all of them.
    constexpr int kEarly = kInFlight == kLoads ? kLoads / 2 : 0;
    const int loads = own.tasks.blocks * kLoads;
    uint4 x[kInFlight];
#pragma unroll
    for (uint4& loaded : x) loaded = load();
    float* to = sums_of(task) + task.share * tile::kTaskColumns + lane_column<2>(own_lane);
    float sums[kLoadedColumns] = {};
#pragma unroll 1
    for (int done = 0; done < loads; done += kLoads) {
      const bool more = done + kLoads < loads;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        add_columns<kType>(x[i % kInFlight], sums);
        const bool next_is_here = i + kInFlight < kLoads;  // of this block
        if (next_is_here || (more && i < kEarly)) x[i % kInFlight] = load();
      }
      if (!more || prefixes()) {
        float of_lane[2];
        sum_over_lanes<2>(sums, own_lane, of_lane);
        *reinterpret_cast<float2*>(to) = make_float2(of_lane[0], of_lane[1]);
        to += tile::kKeyShares * tile::kTaskColumns;
      }
      if (more) {
#pragma unroll
        for (int i = kEarly; i < kInFlight; ++i) x[i] = load();
      }
    }
  }

  // The means of a sequence's first keys.
  __device__ __forceinline__ void average_first_keys(const tile::MeanTask& task) const {
    const int column = 2 * lane();
    const bool present = task.panel * tile::kTaskColumns + column < columns;
    const std::uint16_t* from = rows_of(task) + column;
    float* to = entry(task, view.table.edge_of({task.sequence, 0, 0})) + column;
    float before[2] = {}, segment[2] = {}, sums[2] = {};
#pragma unroll 1
    for (int key = 0; key < tile::kBlockKeys;) {  // of the last one there is no mean
      std::uint32_t words[kWordsInFlight];
#pragma unroll
      for (std::uint32_t& word : words) {
        word = present ? *reinterpret_cast<const std::uint32_t*>(from) : 0u;
        from += v.row_stride;
      }
#pragma unroll
      for (int i = 0; i < kWordsInFlight; ++i, ++key) {
        const float x[2] = {number_of<kType>(words[i]), number_of<kType>(words[i] >> 16)};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          segment[c] += x[c];
          sums[c] += x[c];
        }
        if (key < tile::kFirstKeys) {
          *reinterpret_cast<float2*>(to) = make_float2(mean_of(sums[0], key + 1), mean_of(sums[1], key + 1));
        }
        to += stride;
      }
      if (key % kSegmentKeys == 0) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          before[c] += segment[c];
          sums[c] = before[c];
          segment[c] = 0;
        }
      }
    }
  }

  // The means of a head's whole blocks, from all shares' sums.
  __device__ __forceinline__ void join(tile::MeanTask task) const {
    const int blocks = own.tasks.blocks;
    const int kept = kRows == RowsSee::all_keys ? 1 : own.tasks.kept_blocks();
#pragma unroll 1
    for (task.panel = 0; task.panel < own.tasks.panels.value; ++task.panel) {
      const float* from = sums_of(task) + 2 * lane();
#pragma unroll 1
      for (int block = blocks - kept; block < blocks; ++block) {
        float2 x[tile::kKeyShares];
#pragma unroll
        for (float2& share : x) {
          share = *reinterpret_cast<const float2*>(from);
          from += tile::kTaskColumns;
        }
        float sums[2] = {};
#pragma unroll
        for (const float2& share : x) {
          sums[0] += share.x;
          sums[1] += share.y;
        }
        const int keys = (block + 1) * tile::kBlockKeys;
        float* to = entry(task, view.table.entry_of_blocks({task.sequence, 0, 0}, {0, block + 1})) + 2 * lane();
        *reinterpret_cast<float2*>(to) = make_float2(mean_of(sums[0], keys), mean_of(sums[1], keys));
      }
    }
  }

  // Does a task, by a whole warp. False: none was left.
  __device__ __forceinline__ bool work() {
    const int index = uniform(next);
    if (index >= own.tasks.count) return false;
    next = take();  // the answer takes a while
    if (const tile::MeanTask task = own.tasks.at(index); prefixes() && task.share < 0) {
      average_first_keys(task);
    } else {
      add_share(task);
    }
    const tile::MeanTask task = own.tasks.at(ptx::opaque(index));  // anew: registers are few
    __syncwarp();                                                  // all lanes have written theirs
    std::int32_t* done = own.done(own.tasks.group(task.sequence, task.head));
    const int own_before = lane() == 0 ? ptx::count_up_now(done) : 0;
    prefetch(uniform(next));
    const int before = uniform(own_before);
    if (before + 1 < own.tasks.of_head.value) return true;
    join(task);
    __syncwarp();
    if (lane() == 0) ptx::count_up(done);
    return true;
  }

  // Tasks until `seen` says true, in every lane, or, with `ended`, until none is left. Whoever waits for something
  // waits for it when every task was taken: who must bring it about may be waiting for means.
  template <typename Seen>
  __device__ __forceinline__ void work_until(Seen seen) {
#pragma unroll 1
    while (!seen() && work()) {
    }
  }
};

}  // namespace dspattn::cuda::blocks
