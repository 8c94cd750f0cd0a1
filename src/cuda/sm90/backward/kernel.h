// Gradients of attention with scores pruned to 2:4 or 1:2, one kernel: scores and selection are computed again, bit for
// bit as in the forward, and of all five products nothing of size n_q x n_k touches memory.
//
// A persistent CTA per multiprocessor takes items: key tiles of one (sequence, key head). Warpgroup 0 produces: it
// copies the item's K and V and streams query tiles (Q, dO, log-sum-exps, D) through a ring. The other two consume:
// they keep the key tile's dK and dV in registers and add each query tile's share of dQ to an fp32 sum in the
// workspace, in an order that is fixed (tile/gradient_walk.h). Before it runs prepare_rows(), after it finish_d_q()
// (rows.cu). See docs/backward.md.
#pragma once

#include "cuda/sm90/backward/consumer.h"
#include "cuda/sm90/backward/producer.h"
#include "cuda/sm90/backward/shared.h"

namespace dspattn::cuda::sm90::backward {

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1) fused_backward(const __grid_constant__ BackwardParams params) {
  static_assert(kSharedBytes<C> <= 227 * 1024, "more shared memory than a CTA can have");
  DSPATTN_DYNAMIC_SHARED(unaligned);
  auto& shared = *reinterpret_cast<Shared<C>*>(unaligned + (-ptx::shared_address(unaligned) & 1023u));
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();  // the barriers are initialised for everyone
  // setmaxnreg stands before the code whose registers it grants, on either side: ptxas goes by that (else C7507).
  if (warpgroup > 0) {
    ptx::grow_registers<C::kConsumerRegisters>();
    Consumer<C>(params, shared, warpgroup - 1).run();
  } else {
    ptx::shrink_registers<C::kProducerRegisters>();
    produce<C>(params, shared);
  }
}

}  // namespace dspattn::cuda::sm90::backward
