// Shared memory of the fused forward: tiles, results, mask blocks, barriers, items.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/blocks/barriers.h"
#include "cuda/blocks/item.h"
#include "cuda/blocks/mask_load.h"
#include "cuda/blocks/staged_means.h"
#include "cuda/blocks/work.h"
#include "cuda/sm90/common/params.h"
#include "cuda/sm90/forward/config.h"

namespace dspattn::cuda::sm90 {

// Full variant: results that the consumers hand to the warp that stores them (full.h).
template <typename C, bool kPresent = C::kFull>
struct HandOver {
  std::uint64_t full[C::kConsumers];  // a warpgroup's results are in Q's buffer, and its sums here
  float2 sums[C::kTileQ];             // of a row's weights, and minus their reference
};
template <typename C>
struct HandOver<C, false> {};

// Pairs with a schedule: the item that the first CTA tells the second to take.
template <typename C, bool kPresent = C::kPairs && !C::kFull>
struct PairMessage {
  std::uint64_t told, heard;
  int item;
};
template <typename C>
struct PairMessage<C, false> {};

// With rest = mean, but for the general variant: as many entries of means as rows of an item may share.
template <typename C>
inline constexpr bool kStagesMeans = C::kRestMean && !C::kGeneral;
template <typename C>
using StagedMeans = std::conditional_t<kStagesMeans<C>, MeansStage<C::kFull ? 1 : (C::kTileQ + 254) / 128, C::kHeadDim>,
                                       NoMeansStage>;

template <typename C>
struct alignas(1024) Shared {
  std::uint8_t q[C::kQBuffers][C::kTileQBytes];
  std::uint8_t k[C::kStages][C::kTileKBytes];
  std::uint8_t v[C::kStages][C::kTileKBytes];
  [[no_unique_address]] MaskBlocks<C::kMaskBytes, C::kConsumers> mask;
  std::uint8_t out[C::kOutBytes > 0 ? C::kOutBytes : 1];
  // full: the producer's data has arrived; empty: every consumer warp is done with it. q_scaled: Q stays in shared
  // memory and has been multiplied by 2^-e there.
  std::uint64_t q_full[C::kQBuffers], q_scaled[C::kQBuffers], q_empty[C::kQBuffers];
  std::uint64_t k_full[C::kStages], k_empty[C::kStages];
  std::uint64_t v_full[C::kStages], v_empty[C::kStages];
  // Pairs: the other CTA's consumers are done with it.
  std::uint64_t k_peer_empty[C::kStages], v_peer_empty[C::kStages];
  std::uint64_t tail_begun[C::kStages];   // a tile of a last key block is there to be completed
  std::uint64_t described[C::kQBuffers];  // the item is: where those that load K and V need that
  Item<C::kConsumers> items[C::kFull ? 1 : kItemSlots];  // one a q_full, round robin; full: unused
  [[no_unique_address]] HandOver<C> results;
  [[no_unique_address]] PairMessage<C> message;
  [[no_unique_address]] StagedMeans<C> means;

  // For one thread, before anybody waits. `ragged`: the producer's warps learn of items from their descriptions.
  __device__ __forceinline__ void init_barriers(bool ragged, bool masks_by_tma) {
    const auto init = [](std::uint64_t& barrier, int arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    };
    // Every consumer warp arrives for itself: were one to arrive for its warpgroup, a warp that lags could still be
    // waiting for a phase that is two phases gone, and a parity cannot tell those apart.
    constexpr int kConsumerWarps = 4 * C::kConsumers;
    // So do those of the producer that read an item's description, where nothing else keeps it until they have.
    const int readers = ragged ? C::kTileWarps + (C::kQInRegisters ? C::kTailWarps : 0) : 0;
    for (int i = 0; i < C::kQBuffers; ++i) {
      init(q_full[i], C::kQArrivals);
      init(q_scaled[i], C::kScalingWarps);
      init(q_empty[i], kConsumerWarps + readers);
      init(described[i], 1);
    }
    for (int i = 0; i < C::kStages; ++i) {
      init(k_full[i], 1);
      init(v_full[i], 1);
      init(k_empty[i], kConsumerWarps);
      init(v_empty[i], kConsumerWarps);
      init(k_peer_empty[i], 1);
      init(v_peer_empty[i], 1);
      init(tail_begun[i], 1);
    }
    if constexpr (C::kPairs && !C::kFull) {
      init(message.told, 1);
      init(message.heard, 1);
    }
    if constexpr (C::kFull) {
      for (std::uint64_t& full : results.full) init(full, 4 * 8);  // lanes that store sums of rows
    }
    if constexpr (kStagesMeans<C>) means.init_barriers(kConsumerWarps);
    if constexpr (C::kGeneral) mask.init_barriers(masks_by_tma);
    ptx::mbarrier_init_fence();
  }
};

template <typename C>
inline constexpr int kSharedBytes = static_cast<int>(sizeof(Shared<C>)) + 1024;  // the runtime aligns to 16 bytes only

// How many stages are in use.
template <typename C>
__device__ __forceinline__ int stages_of(const ForwardParams& params) {
  return C::kSparesStage && params.short_items != 0 ? C::kStages - 1 : C::kStages;
}

}  // namespace dspattn::cuda::sm90
