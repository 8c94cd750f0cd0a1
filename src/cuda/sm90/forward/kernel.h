// Attention with scores pruned to 2:4 or 1:2, one kernel: scores on dense tensor cores, selection in registers,
// exponentials of what is kept, values on sparse tensor cores with the selection as metadata. Nothing of size
// n_q x n_k touches memory.
//
// One persistent CTA per multiprocessor. Warpgroup 0 produces: it walks the items (row tiles of one head) and streams
// their K and V tiles through a ring of stages. The others consume: 64 query rows each, all of a CTA's on the same
// tiles. See docs/fused_kernel.md.
#pragma once

#include <type_traits>

#include "cuda/sm90/forward/complete_tails.h"
#include "cuda/sm90/forward/consumer.h"
#include "cuda/sm90/forward/full.h"
#include "cuda/sm90/forward/load_everything.h"
#include "cuda/sm90/forward/load_q.h"
#include "cuda/sm90/forward/load_tiles.h"
#include "cuda/sm90/forward/means.h"
#include "cuda/sm90/forward/roles.h"
#include "cuda/sm90/forward/shared.h"

namespace dspattn::cuda::sm90 {

// The producer's four warps.
template <typename C>
__device__ __forceinline__ void produce(const ForwardParams& params, Shared<C>& shared, bool ragged) {
  const Role role = producer_role<C>(uniform(static_cast<int>(threadIdx.x) / 32), ragged);
  switch (role) {
    case Role::load_q:
      if constexpr (!C::kGeneral && !C::kFull) {
        if (!C::kQInRegisters || ragged) {
          load_queries<C>(params, shared);
          break;
        }
      }
      [[fallthrough]];
    case Role::load_k:
    case Role::load_v:
    case Role::load_kv:
      if constexpr (!C::kGeneral && !C::kFull) {
        if (ragged) {
          load_described_items<C>(params, shared, role);
          break;
        }
      }
      if constexpr (!C::kGeneral) load_walked_items<C>(params, shared, role);
      break;
    case Role::complete_tails:
      if constexpr (!C::kGeneral && !C::kFull) TailCompleter<C>{params, shared}.run();
      break;
    case Role::write_means:
      if constexpr (C::kWritesMeans && !C::kFull) write_means<C>(params);
      break;
    case Role::store_results:
      if constexpr (C::kFull && C::kWritesMeans) store_results_and_write_means<C>(params, shared);
      if constexpr (C::kFull && !C::kWritesMeans) store_results<C>(params, shared);
      break;
    case Role::load_everything:
      if constexpr (C::kGeneral) load_everything<C>(params, shared);
      break;
    case Role::idle:
      break;
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1) fused_forward(const __grid_constant__ ForwardParams params) {
  static_assert(kSharedBytes<C> <= 227 * 1024, "more shared memory than a CTA can have");
  DSPATTN_DYNAMIC_SHARED(unaligned);
  // Pointer arithmetic, not a cast through an integer: the compiler keeps knowing that this is shared memory.
  auto& shared = *reinterpret_cast<Shared<C>*>(unaligned + (-ptx::shared_address(unaligned) & 1023u));
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  const int pairs = C::kPairs ? params.work.pairs : 0;
  const bool ragged = !C::kGeneral && !C::kFull && params.partial_blocks != 0;
  if (threadIdx.x == 0) shared.init_barriers(ragged, params.masks.by_tma != 0);
  const bool overlaps = C::kPairs && params.overlaps != 0;
  if (overlaps) ptx::start_next_kernel();  // which waits, as this one does, before it touches global memory
  if (params.work.schedule != nullptr) ptx::wait_for_kernels_before();
  __syncthreads();                      // the barriers are initialised for everyone
  if (pairs != 0) ptx::cluster_sync();  // of the other CTA, too
  // setmaxnreg stands before the code whose registers it grants, on either side: ptxas goes by that (else C7507).
  if (warpgroup > 0) {
    ptx::grow_registers<C::kConsumerRegisters>();
    std::conditional_t<C::kFull, FullConsumer<C>, Consumer<C>>(params, shared, warpgroup - 1).run();
  } else {
    ptx::shrink_registers<C::kProducerRegisters>();
    if (overlaps) ptx::wait_for_kernels_before();  // consumers touch global memory when a first Q has arrived
    produce<C>(params, shared, ragged);
  }
  if (pairs != 0) {
    // The other CTA may still fill this one's stages or arrive at its barriers.
    if (warpgroup == 0 && threadIdx.x >= 96) return;  // loads nothing that is shared
    ptx::cluster_sync();
  }
}

}  // namespace dspattn::cuda::sm90
