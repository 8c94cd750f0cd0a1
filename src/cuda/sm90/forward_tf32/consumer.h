// A consumer warpgroup of the fused tf32 forward: 64 query rows of each item against the item's key tiles.
//
// The scores of tile j+1 and the output of tile j are issued to the tensor core together; the scores are then selected
// and exponentiated while the other warpgroups' products run. The first scores of the next item are issued with the
// last output product of this one.
#pragma once

#include <cstdint>

#include "cuda/blocks/consumer.h"
#include "cuda/blocks/scores32.h"
#include "cuda/blocks/sink.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_tf32_shapes.h"
#include "cuda/sm90/forward_tf32/shared.h"

namespace dspattn::cuda::sm90::tf32 {

template <typename C>
struct Consumer : ConsumerBase<C, Shared<C>, Consumer<C>> {
  using Base = ConsumerBase<C, Shared<C>, Consumer<C>>;
  using Base::index, Base::is_interior, Base::item, Base::lane, Base::number, Base::ping_pong, Base::release,
      Base::release_q, Base::ring, Base::row_in_tile, Base::shared, Base::skip_after, Base::skip_before,
      Base::skip_entries, Base::thread, Base::tile_end, Base::tile_index;
  using typename Base::TileRing;

  static constexpr int kScoreSteps = C::kHeadDim / 8;
  static constexpr int kValueSteps = C::kTileK / 16;

  const ForwardParams& params;
  tile::QuadTranspose transpose;
  std::uint32_t q_low, k_low, v_low;  // low words of operand descriptors

  float scores[C::kTileK / 2];
  float out[C::kHeadDim / 2];
  std::uint32_t weights[C::kTileK / 4];
  std::uint32_t metadata[C::kTileK / 32];
  std::uint32_t q[kScoreSteps][4];  // unused when Q stays in shared memory
  RowState state;

  __device__ __forceinline__ Consumer(const ForwardParams& p, Shared<C>& s, int warpgroup)
      : Base(s, warpgroup, C::kStages), params(p) {
    transpose = tile::QuadTranspose::of_lane(thread() & 3);
    ptx::pin(transpose.rotation);
    ptx::pin(transpose.own);
    ptx::pin(transpose.selector);
    q_low = ptx::descriptor_low(ptx::shared_address(shared.q) + static_cast<std::uint32_t>(index) * 64 * 128, 16);
    k_low = ptx::descriptor_low(ptx::shared_address(shared.k), 16);
    v_low = ptx::descriptor_low(ptx::shared_address(shared.v), 16);
  }

  __device__ __forceinline__ void pass_masks() {}  // they are read from global memory

  // Takes Q to registers in the layout of a wgmma A operand: rows g and g + 8, columns t and t + 4 of each step's
  // eight. Where it stays in shared memory there is nothing to do.
  __device__ __forceinline__ void load_q(int item_number) {
    if constexpr (C::kQInRegisters) {
      const int row = row_in_tile();
      const std::uint32_t base = ptx::shared_address(shared.q) + 4u * static_cast<std::uint32_t>(thread() & 3);
      std::uint32_t loaded = 0;
#pragma unroll
      for (int step = 0; step < kScoreSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at =
              (step / 4) * C::kPanelQBytes + tile::swizzled_offset(row + 8 * (i & 1), 2 * (step % 4) + (i >> 1));
          q[step][i] = ptx::load_shared(base + static_cast<std::uint32_t>(at));
          loaded ^= q[step][i];
        }
      }
      __syncwarp();  // every lane has read its share
      release_q(item_number, loaded & params.scales.opaque_zero);
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

  __device__ __forceinline__ void issue_first_scores(int stage, int) {
    ptx::wgmma_fence();
    issue_scores(stage);
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
    const bool inside = is_interior();
    const MaskParams& masks = params.masks;
    const bool tensors = C::kGeneral && (masks.bias.data != nullptr || masks.allowed.data != nullptr);
    if (inside && !tensors) return;
    const auto& current = item(number);
    const int block = current.first_block + tile_index / C::kTilesPerBlock;
    const int part = tile_index % C::kTilesPerBlock;
    const int t = thread() & 3;
    const int row = current.row_begin + row_in_tile();
    const int present = current.key_length - block * tile::kBlockKeys;
    if (C::kGeneral && masks.bias.data != nullptr) {
      blocks::tf32::add_bias<C>(scores, params.scales, params.keys, MaskPointers(masks.bias, 4, current, row, block),
                                present, part, t);
    }
    if (C::kGeneral && masks.allowed.data != nullptr) {
      blocks::tf32::mask_allowed<C>(scores, params.keys, MaskPointers(masks.allowed, 1, current, row, block), present,
                                    part, t);
    }
    if (!inside) {
      blocks::tf32::mask_band<C>(scores, params.keys, params.work.left, params.work.right, part, t,
                                 row + current.diagonal - block * tile::kBlockKeys, present);
    }
  }

  __device__ __forceinline__ void weigh(float& tile0, float& tile1) {
    const float scale = params.scales.exp2_scale;
    const float largest = fmaxf(fabsf(state.minus0), fabsf(state.minus1)) * scale;
    if (__all_sync(~0u, !(largest > blocks::tf32::kLargestNearReference)) == 0) {
      blocks::tf32::weigh_tile<C, true>(scores, transpose, scale, state, weights, metadata, tile0, tile1);
    } else {
      blocks::tf32::weigh_tile<C, false>(scores, transpose, scale, state, weights, metadata, tile0, tile1);
    }
  }

  // First tile of an item: no product in flight; its largest scores become the reference.
  __device__ __forceinline__ void first_tile() {
    mask_scores();
    state = empty_rows();
    const Raised raised = blocks::tf32::raise_reference<C>(scores, params.scales.exp2_scale, state);
    weigh(state.sum0, state.sum1);
    forget_unset(raised, state);
  }

  // One step of the main loop: output of the tile before, scores and weights of tile `tile_index`.
  __device__ __forceinline__ void next_tile(int accumulate) {
    TileRing next = ring;
    next.advance();
    next.await_full(shared.k_full);
    ring.await_full(shared.v_full);
    pin_weights();
    ping_pong().await();
    ptx::wgmma_fence();
    issue_scores(next.stage);
    issue_output(ring.stage, accumulate);
    // Passed on when the scores are done and the output product is under way: earlier, and the tensor core would serve
    // all warpgroups alike, which would then all select at the same time while it stands idle.
    ptx::wgmma_wait<1>();
    ping_pong().pass_on();
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
    for (float& score : scores)
      score *= params.scales.opaque_one;  // else the compiler keeps what both passes compute alike
    const Raised raised = blocks::tf32::raise_reference<C>(scores, params.scales.exp2_scale, state);
    shrink(raised, state, out);
    tile0 = tile1 = 0;
    weigh(tile0, tile1);
    forget_unset(raised, state);
  }

  __device__ __forceinline__ void write_rows(const RowSums& sums) {
    store_lse<C>(params.lse, params.scales, item(number), row_in_tile(), lane(), sums, state);
    store_rows<C>(params.out, params.vector_out, item(number), row_in_tile(), lane(), out, sums);
  }
  // An item none of whose rows here sees a key.
  __device__ __forceinline__ void write_empty() {
    state = empty_rows();
    write_rows({0, 0});
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
    if constexpr (!C::kQInRegisters) release_q(number);
    const int trailing = skip_after;
    const bool chained =
        C::kQInRegisters && trailing == 0 && Base::next_item(number + 1) && skip_before == 0 && tile_end > tile_index;
    TileRing next = ring;
    next.advance();
    if (chained) {
      load_q(number + 1);
      next.await_full(shared.k_full);
    }
    ring.await_full(shared.v_full);
    pin_weights();
    ping_pong().await();
    if (chained) {
      ptx::wgmma_fence();
      issue_scores(next.stage);
    }
    ptx::wgmma_fence();
    issue_output(ring.stage, accumulate);
    ptx::wgmma_wait<1>();
    ping_pong().pass_on();
    ptx::wgmma_wait<0>();
    release(shared.v_empty, ring);
    if (chained) release(shared.k_empty, next);
    write_rows(sum_up(state));
    ++number;
    ring = next;
    if (!chained) skip_entries(trailing);
    return chained;
  }

  __device__ __forceinline__ void end() {}
};

}  // namespace dspattn::cuda::sm90::tf32
