// Gradients of attention with scores pruned to 2:4 or 1:2, one kernel: scores and selection are computed again, bit for
// bit as in the forward, and of all five products nothing of size n_q x n_k touches memory.
//
// A persistent CTA per multiprocessor takes items: key tiles of one (sequence, key head). Warpgroup 0 is the queries':
// it copies the item's K and V, streams query tiles (Q, dO, log-sum-exps, D) through a ring, and adds each tile's share
// of dQ to an fp32 sum in the workspace, in an order that is fixed (tile/gradient_walk.h). The other two are the keys':
// they compute P and dS and keep dK and dV in registers. Before it runs prepare_rows(), after it finish_d_q()
// (rows_kernels.cu). See docs/backward.md.
#pragma once

#include "cuda/sm90/backward/key_warpgroup.h"
#include "cuda/sm90/backward/query_warpgroup.h"
#include "cuda/sm90/backward/shared.h"

namespace dspattn::cuda::sm90::backward {

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1) fused_backward(const __grid_constant__ BackwardParams params) {
  static_assert(kSharedBytes<C> <= 227 * 1024, "more shared memory than a CTA can have");
  DSPATTN_DYNAMIC_SHARED(unaligned);
  auto& shared = *reinterpret_cast<Shared<C>*>(unaligned + (-ptx::shared_address(unaligned) & 1023u));
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();           // the barriers are initialised for everyone
  ptx::start_next_kernel();  // finish_d_q() waits for what it reads, tile by tile
  if (params.mask_words.data != nullptr) ptx::wait_for_kernels_before();
  // setmaxnreg stands before the code whose registers it grants, on either side: ptxas goes by that (else C7507).
  if (warpgroup > 0) {
    ptx::grow_registers<C::kKeyRegisters>();
    KeyWarpgroup<C>{params, shared}.run();
  } else {
    ptx::shrink_registers<C::kQueryRegisters>();
    QueryWarpgroup<C>{params, shared}.run();
  }
}

}  // namespace dspattn::cuda::sm90::backward
