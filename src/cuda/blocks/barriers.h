// What the warps of a Hopper kernel wait at: named barriers, and the ring of stages between producer and consumers.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "dspattn/pattern.h"

namespace dspattn::cuda::blocks {

// Hardware barriers of a CTA, by number. 0 is __syncthreads.
enum class NamedBarrier : int {
  producer = 1,   // the producer's 128 threads, or those of its warps that complete tails
  ping_pong = 2,  // + index of a consumer warpgroup: it may issue its products
};

DSPATTN_HOST_DEVICE constexpr int barrier_number(NamedBarrier barrier, int index = 0) {
  return static_cast<int>(barrier) + index;
}

// A stage of the ring and the parity of its current use; advances round robin.
template <int kStages>
struct Ring {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void advance(int stages = kStages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ std::uint32_t barrier(const std::uint64_t* barriers) const {
    return ptx::shared_address(barriers) + 8u * static_cast<std::uint32_t>(stage);
  }
  // Until the producer has filled the stage.
  __device__ __forceinline__ void await_full(const std::uint64_t* full) const {
    ptx::mbarrier_wait(barrier(full), parity);
  }
  // Whether it has, without waiting.
  __device__ __forceinline__ std::uint32_t test_full(const std::uint64_t* full) const {
    return ptx::mbarrier_test(barrier(full), parity);
  }
  // Until the consumers have left the stage.
  __device__ __forceinline__ void await_empty(const std::uint64_t* empty) const {
    ptx::mbarrier_wait(barrier(empty), parity ^ 1);
  }
  // Leaves the stage: the warp's `leader` (1 in one lane, 0 in the others) arrives for its warp. `loaded_zero` is 0,
  // and known only when what the warp loaded from the stage has arrived: see mbarrier_arrive_if().
  __device__ __forceinline__ void release(const std::uint64_t* empty, std::uint32_t leader,
                                          std::uint32_t loaded_zero = 0) const {
    ptx::mbarrier_arrive_if(barrier(empty) + loaded_zero, leader);
  }
};

// Consumer warpgroups issue their products one after the other, once a tile, so that one's selection runs beside the
// other's products. kConsumers: 1 switches it off.
template <int kConsumers>
struct PingPong {
  int index;  // of this warpgroup

  __device__ __forceinline__ void begin() const {
    if (kConsumers > 1 && index == kConsumers - 1) {
      ptx::named_barrier_arrive(barrier_number(NamedBarrier::ping_pong), 256);
    }
  }
  __device__ __forceinline__ void await() const {
    if constexpr (kConsumers > 1) ptx::named_barrier_sync(barrier_number(NamedBarrier::ping_pong, index), 256);
  }
  __device__ __forceinline__ void pass_on() const {
    if constexpr (kConsumers > 1) {
      ptx::named_barrier_arrive(barrier_number(NamedBarrier::ping_pong, index + 1 == kConsumers ? 0 : index + 1), 256);
    }
  }
  __device__ __forceinline__ void end() const {  // takes what the last warpgroup passed on
    if (kConsumers > 1 && index == 0) ptx::named_barrier_sync(barrier_number(NamedBarrier::ping_pong), 256);
  }
};

// The same value in every lane, and the compiler knows it: branches on it do not diverge. What is read from shared
// memory goes through this before it steers products (ptxas otherwise serialises them, C7520) or copies.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

}  // namespace dspattn::cuda::blocks
