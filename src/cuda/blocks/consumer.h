// What every consumer warpgroup of a persistent Hopper kernel does, whatever its products are: follow the items and the
// ring of key tiles, keep to the ping-pong, and pass by what only other warpgroups need.
//
// Consumer is the kernel's own, derived from this: it has load_q(), issue_first_scores(), run_item(), write_empty(),
// pass_masks() and end(), whose purpose run() and skip_entries() show.
#pragma once

#include <cstdint>

#include "cuda/blocks/barriers.h"
#include "cuda/blocks/item.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::blocks {

template <typename C, typename Shared, typename Consumer>
struct ConsumerBase {
  using TileRing = Ring<C::kStages>;

  Shared& shared;
  int index;             // of this warpgroup among the consumers
  int stages;            // of the ring that are in use
  std::uint32_t leader;  // of its warp: every warp arrives for itself, having passed its own waits

  TileRing ring;                     // of the tile whose V is needed next
  int number = 0;                    // of the item in work, among this CTA's
  int tile_index = 0, tile_end = 0;  // own tiles of the item, counted in load order
  tile::KeyBlockRange interior;
  int skip_before = 0, skip_after = 0;  // entries of the ring that only other warpgroups need

  __device__ __forceinline__ ConsumerBase(Shared& s, int warpgroup, int stages_in_use)
      : shared(s), index(warpgroup), stages(stages_in_use), leader(lane() == 0 ? 1u : 0u) {
    ptx::pin(leader);
  }

  // Computed where they are needed, which is rarely: registers are short.
  __device__ __forceinline__ static int thread() { return ptx::opaque(static_cast<int>(threadIdx.x)) & 127; }
  __device__ __forceinline__ static int lane() { return thread() & 31; }
  __device__ __forceinline__ int row_in_tile() const {
    const int own = thread();
    return index * 64 + (own >> 5) * 16 + ((own & 31) >> 2);
  }
  // The first of the warp's rows; uniform.
  __device__ __forceinline__ int warp_row() const { return index * 64 + uniform(thread() >> 5) * 16; }
  __device__ __forceinline__ const Item<C::kConsumers>& item(int item_number) const {
    return shared.items[item_number % kItemSlots];
  }
  __device__ __forceinline__ PingPong<(C::kPingPong ? C::kConsumers : 1)> ping_pong() const { return {index}; }

  __device__ __forceinline__ void release(const std::uint64_t* empty, const TileRing& at,
                                          std::uint32_t loaded_zero = 0) {
    at.release(empty, leader, loaded_zero);
  }
  __device__ __forceinline__ void release_q(int item_number, std::uint32_t loaded_zero = 0) {
    ptx::mbarrier_arrive_if(ptx::shared_address(&shared.q_empty[item_number % C::kQBuffers]) + loaded_zero, leader);
  }

  __device__ __forceinline__ void await_q(int item_number) const {
    const auto& ready = [&]() -> const auto& {
      if constexpr (C::kQIsScaledInPlace) {
        return shared.q_scaled;
      } else {
        return shared.q_full;
      }
    }
    ();
    ptx::mbarrier_wait(ptx::shared_address(ready + item_number % C::kQBuffers), item_number / C::kQBuffers & 1);
  }

  // Waits for the announcement of an item and for its Q, and takes note of this warpgroup's share; false after the
  // last.
  __device__ __forceinline__ bool next_item(int item_number) {
    await_q(item_number);
    // Read together: one latency.
    const int valid = item(item_number).valid;
    const Share share = item(item_number).shares[index];
    tile_index = uniform(share.begin);
    tile_end = uniform(share.end);
    interior = {uniform(share.interior_begin), uniform(share.interior_end)};
    skip_before = uniform(share.skip_before);
    skip_after = uniform(share.skip_after);
    return uniform(valid) != 0;
  }

  // Whether every row sees all keys of tile `tile_index`.
  __device__ __forceinline__ bool is_interior() const {
    const int block = tile_index / C::kTilesPerBlock;
    return block >= interior.begin && block < interior.end;
  }

  // Goes past the next entry of the ring; use() may read the stage of K and returns 0 when that has arrived. No product
  // makes a warp's lanes converge between a wait and the leader's arrival: a lane that lags could find the phase it
  // waits for two phases gone.
  template <typename Use>
  __device__ __forceinline__ void pass_entry(Use use) {
    ring.await_full(shared.k_full);
    const std::uint32_t loaded_zero = use();
    __syncwarp();  // every lane has seen it
    release(shared.k_empty, ring, loaded_zero);
    ping_pong().await();
    ping_pong().pass_on();
    ring.await_full(shared.v_full);
    __syncwarp();
    release(shared.v_empty, ring);
    ring.advance(stages);
  }

  // Entries that other warpgroups work on: only keep the pipeline moving.
  __device__ __forceinline__ void skip_entries(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      self().pass_masks();
      pass_entry([] { return 0u; });
    }
  }

  // All items. run_item() goes through the tiles of one, from its first scores on, and returns whether it has computed
  // the next one's first scores already.
  __device__ __forceinline__ void run() {
    ping_pong().begin();
#pragma unroll 1
    while (next_item(number)) {
      if (tile_end <= tile_index) {  // no row of this warpgroup sees a key
        release_q(number);
        skip_entries(skip_before);
        self().write_empty();
        ++number;
        continue;
      }
      self().load_q(number);
      skip_entries(skip_before);
      ring.await_full(shared.k_full);
      self().issue_first_scores(ring.stage, number);
      ptx::wgmma_wait<0>();
      release(shared.k_empty, ring);
#pragma unroll 1
      while (self().run_item()) {
      }
    }
    ping_pong().end();
    self().end();
  }

 private:
  __device__ __forceinline__ Consumer& self() { return static_cast<Consumer&>(*this); }
};

}  // namespace dspattn::cuda::blocks
