// Attention of fp32 inputs with scores pruned to 1:2, one kernel: scores on dense tensor cores in tf32, selection in
// registers on fp32 scores, exponentials of what is kept, values on sparse tensor cores with the selection as metadata.
// Nothing of size n_q x n_k touches memory.
//
// The shape is that of the 16-bit kernel (sm90/fused): one persistent block per multiprocessor, one producer warpgroup,
// the others consume, 64 query rows each. What differs: tf32 products want V transposed, so the producer's threads
// write it once more, transposed. See docs/fused_kernel.md.
#pragma once

#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused_tf32/config.h"
#include "cuda/sm90/fused_tf32/consumer.h"
#include "cuda/sm90/fused_tf32/producer.h"

namespace dspattn::cuda::sm90::tf32 {

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1) fused_forward_tf32(const __grid_constant__ FusedParams params) {
  DSPATTN_DYNAMIC_SHARED(unaligned);
  // Pointer arithmetic, not a cast through an integer: the compiler keeps knowing that this is shared memory.
  auto& shared = *reinterpret_cast<Shared<C>*>(unaligned + (-ptx::shared_address(unaligned) & 1023u));
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // uniform, and known to be
  constexpr int kConsumerWarps = 4 * C::kConsumers;
  constexpr int kProducerWarps = 4;
  // Of Q and K: one thread arrives for the copy engine, or every thread that copies.
  const auto arrivals = [](int engine) { return C::kGeneral && engine == 0 ? 32 * kProducerWarps : 1; };
  if (threadIdx.x == 0) {
    const auto init = [](std::uint64_t& barrier, int arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    };
    init(shared.q_full, arrivals(params.copy_engine_q));
    init(shared.q_empty, kConsumerWarps);
    for (int i = 0; i < C::kStages; ++i) {
      init(shared.k_full[i], arrivals(params.copy_engine_k));
      init(shared.v_full[i], kProducerWarps);
      init(shared.k_empty[i], kConsumerWarps);
      init(shared.v_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < C::kRawStages; ++i) {
      init(shared.raw_full[i], 1);
      init(shared.raw_empty[i], kProducerWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are initialised for everyone
  if (warpgroup == 0) {
    if constexpr (C::kMovesRegisters) ptx::shrink_registers<C::kProducerRegisters>();
    Producer<C> producer(params, shared);
    producer.run();
  } else {
    if constexpr (C::kMovesRegisters) ptx::grow_registers<C::kConsumerRegisters>();
    Consumer<C> consumer(params, shared, warpgroup - 1);
    consumer.run();
  }
}

}  // namespace dspattn::cuda::sm90::tf32
