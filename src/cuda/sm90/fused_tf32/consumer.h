// A consumer warpgroup of the fused tf32 kernel: 64 query rows of each item against the item's key tiles.
//
// The scores of tile j+1 and the output of tile j are issued to the tensor core together; the scores are then selected
// and exponentiated while the other warpgroups' products run. The first scores of the next item are issued with the
// last output product of this one.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_tf32_shapes.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused_tf32/config.h"
#include "cuda/sm90/fused_tf32/softmax.h"
#include "cuda/sm90/fused_tf32/store.h"

namespace dspattn::cuda::sm90::tf32 {

// The same value in every lane, and the compiler knows it: branches on it do not diverge. What is read from shared
// memory goes through this before it steers products (ptxas otherwise serialises them, C7520).
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

template <typename C>
struct Consumer {
  static constexpr int kScoreSteps = C::kHeadDim / 8;
  static constexpr int kValueSteps = C::kTileK / 16;

  const FusedParams& params;
  Shared<C>& shared;
  const int index;  // of the warpgroup
  tile::QuadTranspose transpose;
  std::uint32_t leader;               // 1 in one lane of each warp
  std::uint32_t q_low, k_low, v_low;  // low words of operand descriptors

  Ring<C::kStages> ring;             // of the tile whose V comes next
  int number = 0;                    // of the item in work, among this block's
  int tile_index = 0, tile_end = 0;  // own tiles of the item, counted as they come
  tile::BlockRange interior;
  int skip_before = 0;  // tiles that only other warpgroups need

  float scores[C::kTileK / 2];
  float out[C::kHeadDim / 2];
  std::uint32_t weights[C::kTileK / 4];
  std::uint32_t metadata[C::kTileK / 32];
  std::uint32_t q[kScoreSteps][4];  // unused when Q stays in shared memory
  RowState state;

  __device__ __forceinline__ Consumer(const FusedParams& p, Shared<C>& s, int warpgroup)
      : params(p), shared(s), index(warpgroup) {
    leader = (thread() & 31) == 0 ? 1u : 0u;
    transpose = tile::QuadTranspose::of_lane(thread() & 3);
    ptx::pin(transpose.rotation);
    ptx::pin(transpose.own);
    ptx::pin(transpose.selector);
    ptx::pin(leader);
    q_low = ptx::descriptor_low(ptx::shared_address(shared.q) + static_cast<std::uint32_t>(index) * 64 * 128, 16);
    k_low = ptx::descriptor_low(ptx::shared_address(shared.k), 16);
    v_low = ptx::descriptor_low(ptx::shared_address(shared.v), 16);
  }

  // Computed where they are needed, which is rarely: registers are short.
  __device__ __forceinline__ static int thread() { return ptx::opaque(static_cast<int>(threadIdx.x)) & 127; }
  __device__ __forceinline__ static int lane() { return thread() & 31; }
  __device__ __forceinline__ int row_in_tile() const {
    const int of_warpgroup = thread();
    return index * 64 + (of_warpgroup >> 5) * 16 + ((of_warpgroup & 31) >> 2);
  }
  __device__ __forceinline__ const Item<C::kConsumers>& item(int of) const { return shared.items[of % kItemSlots]; }

  __device__ __forceinline__ static void wait_full(const std::uint64_t* barriers, const Ring<C::kStages>& at) {
    ptx::mbarrier_wait(ptx::shared_address(barriers) + 8u * static_cast<std::uint32_t>(at.stage), at.parity);
  }
  // Every warp arrives for itself, see fused/kernel.h.
  __device__ __forceinline__ void release(std::uint64_t* barriers, const Ring<C::kStages>& at) {
    ptx::mbarrier_arrive_if(ptx::shared_address(barriers) + 8u * static_cast<std::uint32_t>(at.stage), leader);
  }
  // `come`: 0, once Q has come from there, see mbarrier_arrive_if().
  __device__ __forceinline__ void release_q(std::uint32_t come = 0) {
    ptx::mbarrier_arrive_if(ptx::shared_address(&shared.q_empty) + come, leader);
  }

  // The warpgroups issue their products in turn, one turn a tile. A turn ends when the scores are done and the output
  // product is under way: were it to end with the issue, the tensor core would serve all of them alike, and all would
  // select at the same time while it stands idle.
  __device__ __forceinline__ void take_turn() {
    if constexpr (C::kTakeTurns) ptx::named_barrier_sync(kBarrierTurn + index, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (C::kTakeTurns) {
      ptx::named_barrier_arrive(kBarrierTurn + (index + 1 == C::kConsumers ? 0 : index + 1), 256);
    }
  }

  // Waits for the announcement of an item and for its Q; false after the last.
  __device__ __forceinline__ bool wait_item(int of) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.q_full), of & 1);
    return uniform(item(of).valid) != 0;
  }

  // This warpgroup's share of an item.
  __device__ __forceinline__ void plan(int of) {
    const Share& share = item(of).shares[index];
    tile_index = uniform(share.begin);
    tile_end = uniform(share.end);
    interior = {uniform(share.interior_begin), uniform(share.interior_end)};
    skip_before = uniform(share.skip_before);
  }
  __device__ __forceinline__ int skip_after(int of) const { return uniform(item(of).shares[index].skip_after); }

  // Tiles that other warpgroups work on: only keep the pipeline moving. No product brings a warp's lanes together
  // between a wait and the leader's arrival: a lane that lags could find the phase it waits for two phases gone.
  __device__ __forceinline__ void skip_tiles(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_full(shared.k_full, ring);
      __syncwarp();  // every lane has seen it
      release(shared.k_empty, ring);
      take_turn();
      pass_turn();
      wait_full(shared.v_full, ring);
      __syncwarp();
      release(shared.v_empty, ring);
      ring.advance();
    }
  }

  // Takes Q to registers in the layout of a wgmma A operand: rows g and g + 8, columns t and t + 4 of each step's
  // eight. Where it stays in shared memory there is nothing to do.
  __device__ __forceinline__ void load_q() {
    if constexpr (C::kQInRegisters) {
      const int row = row_in_tile();
      const std::uint32_t base = ptx::shared_address(shared.q) + 4u * static_cast<std::uint32_t>(thread() & 3);
      std::uint32_t come = 0;
#pragma unroll
      for (int step = 0; step < kScoreSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at =
              (step / 4) * C::kPanelQBytes + tile::swizzled_offset(row + 8 * (i & 1), 2 * (step % 4) + (i >> 1));
          q[step][i] = ptx::load_shared(base + static_cast<std::uint32_t>(at));
          come ^= q[step][i];
        }
      }
      __syncwarp();  // every lane has read its share
      release_q(come & params.zero);
    }
  }

  __device__ __forceinline__ void issue_scores(int stage) {
    const std::uint32_t k = k_low + static_cast<std::uint32_t>(stage) * (C::kTileKBytes >> 4);
#pragma unroll
    for (int step = 0; step < kScoreSteps; ++step) {
      const std::uint64_t b = ptx::descriptor(k + (step / 4) * (C::kPanelKBytes >> 4) + (step % 4) * 2);
      if constexpr (C::kQInRegisters) {
        if (step == 0) {
          ptx::wgmma_tf32_first(scores, q[step], b);
        } else {
          ptx::wgmma_tf32(scores, q[step], b);
        }
      } else {
        const std::uint64_t a = ptx::descriptor(q_low + (step / 4) * (C::kPanelQBytes >> 4) + (step % 4) * 2);
        if (step == 0) {
          ptx::wgmma_tf32_first(scores, a, b);
        } else {
          ptx::wgmma_tf32(scores, a, b);
        }
      }
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_output(int stage, int accumulate) {
    const std::uint32_t v = v_low + static_cast<std::uint32_t>(stage) * (C::kTileKBytes >> 4);
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const std::uint64_t b = ptx::descriptor(v + (step / 2) * (C::kPanelVBytes >> 4) + (step % 2) * 4);
      if (step % 2 == 0) {
        ptx::wgmma_tf32_sparse<0>(out, weights + 4 * step, b, metadata[step / 2], step > 0 ? 1 : accumulate);
      } else {
        ptx::wgmma_tf32_sparse<1>(out, weights + 4 * step, b, metadata[step / 2], 1);
      }
    }
    ptx::wgmma_commit();
  }

  // The weights and metadata a product will read are computed before its fence, not sunk below it.
  __device__ __forceinline__ void pin_weights() {
#pragma unroll
    for (std::uint32_t& weight : weights) ptx::pin(weight);
#pragma unroll
    for (std::uint32_t& word : metadata) ptx::pin(word);
  }

  // Masks the scores of tile `tile_index`: mask tensors, and the band unless every row sees all of the tile's keys. No
  // product is in flight.
  __device__ __forceinline__ void mask_scores() {
    const int come = tile_index / C::kTilesPerBlock;  // blocks before
    const bool inside = come >= interior.begin && come < interior.end;
    const bool tensors = C::kGeneral && (params.bias.data != nullptr || params.allowed.data != nullptr);
    if (inside && !tensors) return;
    const auto& of = item(number);
    const int block = of.first_block + come;
    const int part = tile_index % C::kTilesPerBlock;
    const int t = thread() & 3;
    const int row = of.row_begin + row_in_tile();
    const int keys = of.key_length - block * tile::kBlockKeys;
    if (C::kGeneral && params.bias.data != nullptr) {
      tf32::add_bias<C>(scores, params, MaskPointers(params.bias, 4, of, row, block), keys, part, t);
    }
    if (C::kGeneral && params.allowed.data != nullptr) {
      tf32::mask_allowed<C>(scores, params, MaskPointers(params.allowed, 1, of, row, block), keys, part, t);
    }
    if (!inside) tf32::mask_band<C>(scores, params, part, t, row + of.diagonal - block * tile::kBlockKeys, keys);
  }

  __device__ __forceinline__ void weigh(float& tile0, float& tile1) {
    tf32::weigh_tile<C>(scores, transpose, params.exp2_scale, state, weights, metadata, tile0, tile1);
  }

  // First tile of an item: no product in flight; its largest scores become the reference.
  __device__ __forceinline__ void first_tile() {
    mask_scores();
    state = {0, 0, NAN, NAN};
    const Raised raised = tf32::raise_reference<C>(scores, params.exp2_scale, state);
    weigh(state.sum0, state.sum1);
    forget_unset(raised, state);
  }

  // One step of the main loop: output of the tile before, scores and weights of tile `tile_index`.
  __device__ __forceinline__ void next_tile(int accumulate) {
    Ring<C::kStages> next = ring;
    next.advance();
    wait_full(shared.k_full, next);
    wait_full(shared.v_full, ring);
    pin_weights();
    take_turn();
    ptx::wgmma_fence();
    issue_scores(next.stage);
    issue_output(ring.stage, accumulate);
    ptx::wgmma_wait<1>();
    pass_turn();
    release(shared.k_empty, next);
    ptx::wgmma_wait<0>();
    release(shared.v_empty, ring);
    mask_scores();
    float tile0 = 0, tile1 = 0;
    weigh(tile0, tile1);
    // False also for NaN: a row without a reference.
    if (!__all_sync(~0u, tile0 < C::kWeightLimit && tile1 < C::kWeightLimit)) raise_and_repeat(tile0, tile1);
    state.sum0 += tile0;
    state.sum1 += tile1;
    ring = next;
  }

  // A tile's weights passed the limit, or a row has no reference yet: raise it and weigh the tile again.
  __device__ __forceinline__ void raise_and_repeat(float& tile0, float& tile1) {
#pragma unroll
    for (float& score : scores) score *= params.one;  // else the compiler keeps what both passes compute alike
    const Raised raised = tf32::raise_reference<C>(scores, params.exp2_scale, state);
    shrink(raised);
    tile0 = tile1 = 0;
    weigh(tile0, tile1);
    forget_unset(raised, state);
  }

  // What the item has accumulated, relative to the raised reference.
  __device__ __forceinline__ void shrink(const Raised& by) {
    state.sum0 *= by.shrink0;
    state.sum1 *= by.shrink1;
#pragma unroll
    for (int i = 0; i < C::kHeadDim / 2; i += 4) {
      out[i] *= by.shrink0;
      out[i + 1] *= by.shrink0;
      out[i + 2] *= by.shrink1;
      out[i + 3] *= by.shrink1;
    }
  }

  __device__ __forceinline__ void write_item() {
    tf32::store_rows<C>(params, item(number), row_in_tile(), lane(), out, state);
  }
  // An item none of whose rows here sees a key.
  __device__ __forceinline__ void write_empty() {
    state = {0, 0, NAN, NAN};
    tf32::store_rows<C>(params, item(number), row_in_tile(), lane(), out, state);
  }

  // All tiles of the item from its first scores on; true when the next item's first scores are computed already.
  __device__ __forceinline__ bool run_item() {
    first_tile();
    int accumulate = 0;
#pragma unroll 1
    for (++tile_index; tile_index < tile_end; ++tile_index) {
      next_tile(accumulate);
      accumulate = 1;
    }
    if constexpr (!C::kQInRegisters) release_q();
    const int trailing = skip_after(number);
    bool chained = false;
    if (C::kQInRegisters && trailing == 0 && wait_item(number + 1)) {
      plan(number + 1);
      chained = skip_before == 0 && tile_end > tile_index;
    }
    Ring<C::kStages> next = ring;
    next.advance();
    if (chained) {
      load_q();
      wait_full(shared.k_full, next);
    }
    wait_full(shared.v_full, ring);
    pin_weights();
    take_turn();
    if (chained) {
      ptx::wgmma_fence();
      issue_scores(next.stage);
    }
    ptx::wgmma_fence();
    issue_output(ring.stage, accumulate);
    ptx::wgmma_wait<1>();
    pass_turn();
    ptx::wgmma_wait<0>();
    release(shared.v_empty, ring);
    if (chained) release(shared.k_empty, next);
    write_item();
    ++number;
    ring = next;
    if (!chained) skip_tiles(trailing);
    return chained;
  }

  __device__ __forceinline__ void run() {
    if (C::kTakeTurns && index == C::kConsumers - 1) ptx::named_barrier_arrive(kBarrierTurn, 256);
#pragma unroll 1
    while (wait_item(number)) {
      plan(number);
      if (tile_end <= tile_index) {  // no row of this warpgroup sees a key
        release_q();
        skip_tiles(skip_before);
        write_empty();
        ++number;
        continue;
      }
      load_q();
      skip_tiles(skip_before);
      wait_full(shared.k_full, ring);
      ptx::wgmma_fence();
      issue_scores(ring.stage);
      ptx::wgmma_wait<0>();
      release(shared.k_empty, ring);
#pragma unroll 1
      while (run_item()) {
      }
    }
    if (C::kTakeTurns && index == 0) ptx::named_barrier_sync(kBarrierTurn, 256);  // the last turn passed on
  }
};

}  // namespace dspattn::cuda::sm90::tf32
