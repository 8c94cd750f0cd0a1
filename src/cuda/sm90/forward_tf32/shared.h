// Shared memory of the fused tf32 forward: tiles, barriers, items.
#pragma once

#include <cstdint>

#include "cuda/blocks/barriers.h"
#include "cuda/blocks/item.h"
#include "cuda/blocks/work.h"
#include "cuda/sm90/common/params.h"
#include "cuda/sm90/forward_tf32/config.h"

namespace dspattn::cuda::sm90::tf32 {

template <typename C>
struct alignas(1024) Shared {
  std::uint8_t q[C::kQBuffers][C::kTileQBytes];
  std::uint8_t k[C::kStages][C::kTileKBytes];
  std::uint8_t v[C::kStages][C::kTileKBytes];       // transposed
  std::uint8_t raw[C::kRawStages][C::kTileKBytes];  // V in the order of K
  // full: the producer's data has arrived; empty: every consumer warp (of raw: every producer warp) is done with it.
  std::uint64_t q_full[C::kQBuffers], q_empty[C::kQBuffers];
  std::uint64_t k_full[C::kStages], k_empty[C::kStages];
  std::uint64_t v_full[C::kStages], v_empty[C::kStages];
  std::uint64_t raw_full[C::kRawStages], raw_empty[C::kRawStages];
  Item<C::kConsumers> items[kItemSlots];  // one a q_full, round robin

  // For one thread, before anybody waits. Q and K: one thread arrives for TMA, or every thread that copies.
  __device__ __forceinline__ void init_barriers(bool tma_q, bool tma_k) {
    constexpr int kConsumerWarps = 4 * C::kConsumers;
    constexpr int kProducerWarps = 4;
    const auto init = [](std::uint64_t& barrier, int arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    };
    const auto arrivals = [](bool by_tma) { return C::kGeneral && !by_tma ? 32 * kProducerWarps : 1; };
    init(q_full[0], arrivals(tma_q));
    init(q_empty[0], kConsumerWarps);
    for (int i = 0; i < C::kStages; ++i) {
      init(k_full[i], arrivals(tma_k));
      init(v_full[i], kProducerWarps);
      init(k_empty[i], kConsumerWarps);
      init(v_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < C::kRawStages; ++i) {
      init(raw_full[i], 1);
      init(raw_empty[i], kProducerWarps);
    }
    ptx::mbarrier_init_fence();
  }
};

template <typename C>
inline constexpr int kSharedBytes = static_cast<int>(sizeof(Shared<C>)) + 1024;  // the runtime aligns to 16 bytes only

}  // namespace dspattn::cuda::sm90::tf32
