// The variant for full attention: every row sees all keys, and these are whole blocks. All items are alike, so nobody
// describes them, nothing is masked, and a consumer has little to do between two of them: it leaves an item's results
// in shared memory and the sums of its rows beside them, and a warp of the producer stores them.
#pragma once

#include <cstdint>

#include "cuda/blocks/sink.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/forward/consumer.h"
#include "cuda/sm90/forward/shared.h"

namespace dspattn::cuda::sm90 {

// How many items this block's pair has.
__device__ __forceinline__ int items_of_pair(const WorkParams& params) {
  return tile::items_of_worker<false>(params.order, static_cast<int>(blockIdx.x) >> 1);
}

template <typename C>
struct FullConsumer : Consumer<C, FullConsumer<C>> {
  using Base = Consumer<C, FullConsumer<C>>;
  using Base::Base;
  using Base::number, Base::params, Base::products, Base::ring, Base::shared, Base::stages, Base::tile_end,
      Base::tile_index, Base::weigher;

  // The item's results, for the warp that stores them. They take Q's buffer: the next one, if there is one, is in
  // registers, and it could be loaded only when the results before these had been sent.
  __device__ __forceinline__ void hand_over(const RowSums& sums) {
    const int lane = Base::lane();
    const std::uint32_t tile = ptx::shared_address(shared.q[0]) + static_cast<std::uint32_t>(Base::warp_row()) * 128;
    const std::uint32_t last = stage_rows<C>(tile, lane, products.out, sums);
    const bool has_sums = (lane & 3) == 0;
    if (has_sums) {
      const int row = Base::row_in_tile();
      shared.results.sums[row] = {sums.sum0, weigher.state.minus0};
      shared.results.sums[row + 8] = {sums.sum1, weigher.state.minus1};
    }
    // As it may overtake loads (ptx/barrier.h), the arrival might overtake stores: it needs what is read back.
    const std::uint32_t stored = ptx::load_shared(last) & params.scales.opaque_zero;
    __syncwarp();
    ptx::mbarrier_arrive_if(ptx::shared_address(&shared.results.full[Base::index]) + stored, has_sums ? 1 : 0);
  }

  // As Consumer's. All rows have the same mean.
  __device__ __forceinline__ void add_rest(const RowSums& rest) {
    if constexpr (C::kRestMean) {
      shared.means.await(number);
      const float* mean = &shared.means.rows[0][2 * (Base::lane() & 3)];
      add_means<C>({mean, mean}, rest, products.out);
    }
  }

  // All tiles of an item from its first scores on, and the next item's first scores, if there is one.
  __device__ __forceinline__ void run_item(bool more) {
    Base::look_ahead(ring);
    weigher.first_tile(Base::template packed_scores<Hidden::nothing>(), products);
    Base::await_tile();
    int accumulate = 0;
#pragma unroll 1
    for (;;) {
      Base::settle();
      if (++tile_index >= tile_end) break;
#pragma unroll 1
      for (;;) {
        Base::template next_tile<Hidden::nothing>(accumulate);
        accumulate = 1;
        if (!weigher.weights_fit(tile_index + 1 < tile_end)) break;
        weigher.add_weights();
        ++tile_index;
      }
    }
    products.pin_weights();
    Base::ping_pong().await();
    ptx::wgmma_fence();
    products.issue_output(ring.stage, accumulate);
    ptx::wgmma_commit();
    Base::ping_pong().pass_on();
    // While the tensor core works on the last output: all that does not need it.
    RowSums rest;
    const RowSums sums = Base::sum_up_rows(rest);
    typename Base::TileRing next = ring;
    next.advance(stages);
    if (more) {
      tile_index = 0;
      Base::await_q(number + 1);
      Base::load_q(number + 1, true);
      next.await_full(shared.k_full);
      Base::issue_first_scores(next.stage, number + 1);
      ptx::wgmma_wait<1>();
      Base::release(shared.v_empty, ring);
      add_rest(rest);
      hand_over(sums);  // while the tensor core works on the scores
      Base::release_means();
      ptx::wgmma_wait<0>();
      Base::release(shared.k_empty, next);
    } else {
      ptx::wgmma_wait<0>();
      Base::release(shared.v_empty, ring);
      // No next Q was loaded: waits until the results of the item before have been sent.
      if (number > 0) ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[0]), number & 1);
      add_rest(rest);
      hand_over(sums);
      Base::release_means();
    }
    ptx::wgmma_wait<0>();  // asked for where the two ways meet (C7515)
    ++number;
    ring = next;
  }

  __device__ __forceinline__ void run() {
    const int items = items_of_pair(params.work);
    tile_end = uniform(params.work.n_k / C::kTileK);
    Base::ping_pong().begin();
    Base::await_q(0);
    Base::load_q(0);
    ring.await_full(shared.k_full);
    Base::issue_first_scores(ring.stage, 0);
    ptx::wgmma_wait<0>();
    Base::release(shared.k_empty, ring);
#pragma unroll 1
    while (number < items) run_item(number + 1 < items);
    Base::ping_pong().end();
  }
};

// The producer's fourth warp: writes what the consumers hand over, and gives Q's buffer back in their name.
template <typename C>
__device__ __forceinline__ void store_results(const ForwardParams& params, Shared<C>& shared) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int items = items_of_pair(params.work);
#pragma unroll 1
  for (int number = 0; number < items; ++number) {
    Work work{};
    describe_item<C, false>(params.work, number, work);
#pragma unroll 1
    for (int index = 0; index < C::kConsumers; ++index) {
      const int first = work.row_begin + index * 64;
      ptx::mbarrier_wait(ptx::shared_address(&shared.results.full[index]), number & 1);
      if (ptx::elect()) {
        ptx::fence_async_proxy_seen();
#pragma unroll 1
        for (int panel = 0; panel < C::kPanels; ++panel) {
          const std::uint32_t tile =
              ptx::shared_address(shared.q[0]) + static_cast<std::uint32_t>(panel * C::kPanelQBytes + index * 64 * 128);
          ptx::tma_store_4d(&params.out_map, tile, panel * 64, first, work.head, work.batch);
        }
        ptx::tma_store_commit();
      }
      __syncwarp();
      if (params.lse.data != nullptr) {
        float* lse = params.lse.data + params.lse.offset(work.batch, work.head, first);
#pragma unroll
        for (int row = lane; row < 64; row += 32) {
          const float2 sums = shared.results.sums[index * 64 + row];
          if (first + row < work.rows) {
            lse[row * params.lse.row_stride] = log_sum_exp<C>(params.scales, sums.x, sums.y);
          }
        }
      }
    }
    if (ptx::elect()) ptx::tma_store_wait_read();
    __syncwarp();
    // As many arrivals as there are consumer warps: they gave the first Q's buffer back themselves. None after the last
    // item, for which nobody would wait.
    const bool arrives = lane < 4 * C::kConsumers && number + 1 < items;
    ptx::mbarrier_arrive_if(ptx::shared_address(&shared.q_empty[0]), arrives ? 1 : 0);
  }
}

}  // namespace dspattn::cuda::sm90
