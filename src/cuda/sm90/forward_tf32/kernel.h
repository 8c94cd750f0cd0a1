// Attention of fp32 inputs with scores pruned to 1:2, one kernel: scores on dense tensor cores in tf32, selection in
// registers on fp32 scores, exponentials of what is kept, values on sparse tensor cores with the selection as metadata.
// Nothing of size n_q x n_k touches memory.
//
// The shape is that of the 16-bit kernel (sm90/forward): one persistent CTA per multiprocessor, one producer warpgroup,
// the others consume, 64 query rows each. What differs: tf32 products want V transposed, so the producer's threads
// write it once more, transposed. See docs/fused_kernel.md.
#pragma once

#include "cuda/sm90/forward_tf32/consumer.h"
#include "cuda/sm90/forward_tf32/producer.h"
#include "cuda/sm90/forward_tf32/shared.h"

namespace dspattn::cuda::sm90::tf32 {

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1) fused_forward_tf32(const __grid_constant__ ForwardParams params) {
  DSPATTN_DYNAMIC_SHARED(unaligned);
  // Pointer arithmetic, not a cast through an integer: the compiler keeps knowing that this is shared memory.
  auto& shared = *reinterpret_cast<Shared<C>*>(unaligned + (-ptx::shared_address(unaligned) & 1023u));
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (threadIdx.x == 0) shared.init_barriers(params.tma_q != 0, params.tma_k != 0);
  __syncthreads();  // the barriers are initialised for everyone
  if (warpgroup == 0) {
    if constexpr (C::kMovesRegisters) ptx::shrink_registers<C::kProducerRegisters>();
    Producer<C>(params, shared).run();
  } else {
    if constexpr (C::kMovesRegisters) ptx::grow_registers<C::kConsumerRegisters>();
    Consumer<C>(params, shared, warpgroup - 1).run();
  }
}

}  // namespace dspattn::cuda::sm90::tf32
