// Threads of the producer that send results from shared memory to the output, one for each consumer warpgroup.
//
// A consumer that told the copy engine itself would wait for its own stores to shared memory first, some hundred cycles
// of every item; a barrier in shared memory keeps their order without that.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/params.h"

namespace dspattn::cuda::sm90 {

template <typename C>
__device__ __forceinline__ bool has_senders(const FusedParams& params) {
  return C::kHasSenders && params.senders != 0;
}

// Where a warpgroup's results wait to be sent.
template <typename C>
__device__ __forceinline__ std::uint32_t place_of_results(const FusedParams& params, Shared<C>& shared) {
  const std::uint8_t* own = C::kOutInPlaceOfQ ? shared.v[C::kStages - 1] : shared.out;
  return ptx::shared_address(has_out_place<C>(params) ? own : shared.q[0]);
}

// Sends what warpgroup `index` hands over, until that says there is no more.
template <typename C>
__device__ __forceinline__ void send_results(const FusedParams& params, Shared<C>& shared, int index) {
  const std::uint32_t tile = place_of_results<C>(params, shared) + static_cast<std::uint32_t>(index) * 64 * 128;
  const std::uint32_t full = ptx::shared_address(&shared.out_full[index]);
  const std::uint32_t empty = ptx::shared_address(&shared.out_empty[index]);
#pragma unroll 1
  for (int parity = 0;; parity ^= 1) {
    ptx::mbarrier_wait(full, parity);
    const OutPlace to = shared.out_to[index];
    if (to.head < 0) return;
    ptx::fence_async_proxy();  // between the warpgroup's stores, seen through the barrier, and the copy engine's reads
#pragma unroll 1
    for (int panel = 0; panel < C::kPanels; ++panel) {
      ptx::tma_store_4d(&params.out_map, tile + static_cast<std::uint32_t>(panel * C::kPanelQBytes), panel * 64,
                        to.out_row, to.head, to.batch);
    }
    ptx::tma_store_commit();
    ptx::tma_store_wait_read();
    ptx::mbarrier_arrive(empty);
    if (!has_out_place<C>(params)) {  // the place is the next Q's: for each of the warpgroup's warps
      for (int warp = 0; warp < 4; ++warp) ptx::mbarrier_arrive(ptx::shared_address(&shared.q_empty[0]));
    }
  }
}

}  // namespace dspattn::cuda::sm90
