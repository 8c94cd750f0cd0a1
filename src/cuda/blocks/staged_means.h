// The means of V that an item's rows add to their output (rest = mean), brought to shared memory while the item is in
// work: from the table they would come a thousand cycles late, at the end of every item.
#pragma once

#include <cstdint>

#include "cuda/blocks/add_means.h"
#include "cuda/blocks/barriers.h"
#include "cuda/blocks/work.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/tile/means.h"

namespace dspattn::cuda::blocks {

// In shared memory. kRows: as many entries as a row tile may share.
template <int kRows, int kHeadDim>
struct MeansStage {
  alignas(16) float rows[kRows][kHeadDim];
  std::uint64_t full, empty;  // an item's are here; every consumer warp is done with them
  tile::TileMeans means;

  __device__ __forceinline__ void init_barriers(int consumer_warps) {
    ptx::mbarrier_init(ptx::shared_address(&full), 1);
    ptx::mbarrier_init(ptx::shared_address(&empty), consumer_warps);
  }

  // By one thread of the producer: those of item number `number` of this CTA, when the ones before are done with. The
  // table is written by a kernel that may still run.
  __device__ __forceinline__ void load(const MeansView& view, const Work& work, int tile_rows, int number) {
    ptx::mbarrier_wait(ptx::shared_address(&empty), (number & 1) ^ 1);
    ptx::wait_for_kernels_before();
    const int last = min(work.row_begin + tile_rows, work.rows) - 1;
    means = tile::tile_means(view.table, {work.sequence, work.k_row, 0}, work.band, work.row_begin, last);
    const int bytes = means.count * kHeadDim * static_cast<int>(sizeof(float));
    ptx::mbarrier_arrive_expect(ptx::shared_address(&full), bytes);
    if (bytes == 0) return;
    const int entry = view.heads_per_mean.quotient(work.head) * static_cast<int>(view.table.entries) + means.first_entry;
    ptx::bulk_load(ptx::shared_address(rows), view.data + std::int64_t{entry} * kHeadDim, bytes,
                   ptx::shared_address(&full));
  }

  __device__ __forceinline__ void await(int number) const {
    ptx::mbarrier_wait(ptx::shared_address(&full), number & 1);
  }
  // By a whole warp that has read what it needs; `leader`: 1 in one lane.
  __device__ __forceinline__ void release(std::uint32_t leader) {
    __syncwarp();
    ptx::mbarrier_arrive_if(ptx::shared_address(&empty), leader);
  }

  // Where those of a thread's rows `row` and row + 8 of the tile are. False, in the whole warp, where a row has an entry
  // of its own.
  __device__ __forceinline__ bool find(int row, int lane, RowMeans& found) const {
    const int slot0 = means.slot_of(row), slot1 = means.slot_of(row + 8);
    const int column = 2 * (lane & 3);
    found = {&rows[slot0 < 0 ? 0 : slot0][column], &rows[slot1 < 0 ? 0 : slot1][column]};
    return uniform(slot0) >= 0;  // that of the warp's first row
  }
};
struct NoMeansStage {};

}  // namespace dspattn::cuda::blocks
