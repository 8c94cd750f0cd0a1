// Attention with scores pruned to 2:4 or 1:2, one kernel: scores on dense tensor cores, selection in registers,
// exponentials of what is kept, values on sparse tensor cores with the selection as metadata. Nothing of size
// n_q x n_k touches memory.
//
// One persistent block per multiprocessor. Warpgroup 0 produces: it walks the items (row tiles of one head) and streams
// their K and V tiles through a ring of stages. The others consume: 64 query rows each, all of a block's on the same
// tiles. See docs/fused_kernel.md.
#pragma once

#include <type_traits>

#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/consumer.h"
#include "cuda/sm90/fused/full.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused/producer.h"

namespace dspattn::cuda::sm90 {

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1) fused_forward(const __grid_constant__ FusedParams params) {
  static_assert(kSharedBytes<C> <= 227 * 1024, "more shared memory than a thread block can have");
  DSPATTN_DYNAMIC_SHARED(unaligned);
  // Pointer arithmetic, not a cast through an integer: the compiler keeps knowing that this is shared memory.
  auto& shared = *reinterpret_cast<Shared<C>*>(unaligned + (-ptx::shared_address(unaligned) & 1023u));
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // uniform, and known to be
  const int pairs = C::kPairs ? params.pairs : 0;
  // Every consumer warp arrives for itself: were one to arrive for its warpgroup, a warp that lags could still be
  // waiting for a phase that is two phases gone, and a parity cannot tell those apart.
  constexpr int kConsumerWarps = 4 * C::kConsumers;
  const bool ragged = !C::kGeneral && params.partial_blocks != 0;
  // So do those of the producer that read an item's description, where nothing else keeps it until they have.
  const int readers = ragged ? C::kTileWarps + (C::kQInRegisters ? C::kAssistants : 0) : 0;
  if (threadIdx.x == 0) {
    const auto init = [](std::uint64_t& barrier, int arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    };
    for (int i = 0; i < C::kQBuffers; ++i) {
      init(shared.q_full[i], C::kQArrivals);
      init(shared.q_scaled[i], C::kScalingWarps);
      init(shared.q_empty[i], kConsumerWarps + readers);
      init(shared.described[i], 1);
    }
    for (int i = 0; i < C::kStages; ++i) {
      init(shared.k_full[i], 1);
      init(shared.v_full[i], 1);
      init(shared.k_empty[i], kConsumerWarps);
      init(shared.v_empty[i], kConsumerWarps);
      init(shared.k_peer_empty[i], 1);
      init(shared.v_peer_empty[i], 1);
      init(shared.tail_begun[i], 1);
    }
    if constexpr (C::kPairs && !C::kFull) {
      init(shared.turn.told, 1);
      init(shared.turn.heard, 1);
    }
    if constexpr (C::kFull) {
      for (std::uint64_t& full : shared.results.full) init(full, 4 * 8);  // lanes that store sums of rows
    }
    if constexpr (C::kGeneral) {
      for (std::uint64_t& full : shared.mask.full) init(full, params.mask_engine != 0 ? 1 : kMaskThreads);
      for (std::uint64_t& empty : shared.mask.empty) init(empty, params.mask_engine != 0 ? 4 : 128);
    }
    ptx::mbarrier_init_fence();
  }
  const bool early = C::kPairs && params.alike != 0;
  if (early) ptx::start_next_kernel();  // which waits, as this one does, before it touches global memory
  if (params.schedule != nullptr) ptx::wait_for_kernels_before();
  __syncthreads();                      // the barriers are initialised for everyone
  if (pairs != 0) ptx::cluster_sync();  // of the other one, too
  if (warpgroup == 0) {
    ptx::shrink_registers<C::kProducerRegisters>();
    if (early) ptx::wait_for_kernels_before();  // consumers touch global memory when a first Q has come
    produce<C>(params, shared);
  } else {
    ptx::grow_registers<C::kConsumerRegisters>();
    using Consumes = std::conditional_t<C::kFull, FullConsumer<C>, Consumer<C>>;
    Consumes consumer(params, shared, warpgroup - 1);
    consumer.run();
  }
  if (pairs != 0) {
    // The other one may still fill this one's stages or arrive at its barriers.
    if (warpgroup == 0 && threadIdx.x >= 96) return;  // brings nothing that is shared
    ptx::cluster_sync();
  }
}

}  // namespace dspattn::cuda::sm90
