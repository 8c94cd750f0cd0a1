// A consumer warpgroup of the fused forward: 64 query rows of each item against the item's key tiles.
//
// The scores of tile j+1 and the output of tile j are issued to the tensor core together; while the output product
// runs, the scores of tile j+1 are selected and exponentiated. Beside the last output product of an item the next one
// is prepared, and beside that one's first scores the results are written (the epilogue).
#pragma once

#include <cstdint>

#include "cuda/blocks/add_means.h"
#include "cuda/blocks/consumer.h"
#include "cuda/blocks/mask_load.h"
#include "cuda/blocks/mask_words.h"
#include "cuda/blocks/products16.h"
#include "cuda/blocks/scores16.h"
#include "cuda/blocks/sink.h"
#include "cuda/blocks/weigh16.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/forward/shared.h"

namespace dspattn::cuda::sm90 {

// Derived: the consumer that is run, this one or one derived from it.
template <typename C, typename Derived = void>
struct Consumer : ConsumerBase<C, Shared<C>, std::conditional_t<std::is_void_v<Derived>, Consumer<C>, Derived>> {
  using Base = ConsumerBase<C, Shared<C>, std::conditional_t<std::is_void_v<Derived>, Consumer<C>, Derived>>;
  using Base::index, Base::interior, Base::is_interior, Base::item, Base::lane, Base::leader, Base::number,
      Base::ping_pong, Base::release, Base::release_q, Base::ring, Base::row_in_tile, Base::shared, Base::skip_after,
      Base::skip_before, Base::skip_entries, Base::stages, Base::thread, Base::tile_end, Base::tile_index,
      Base::warp_row;
  using typename Base::TileRing;

  const ForwardParams& params;
  Weigher<C> weigher;
  Products<C> products;
  PackedWords<C> masked;                   // general variant only: the last tile's scores
  int mask_tiles = 0;                      // general variant only: tiles so far
  std::uint32_t k_ready = 0, v_ready = 0;  // whether the next tile's K and V were seen to be there already
  std::uint32_t q_taken = 0;               // results of the last item are in Q's buffer

  __device__ __forceinline__ Consumer(const ForwardParams& p, Shared<C>& s, int warpgroup)
      : Base(s, warpgroup, stages_of<C>(p)), params(p), weigher(p.scales, lane(), p.coarse_slope) {
    products.point_to(shared, index);
  }

  // Masks of a tile that only others need. Before the ping-pong: another warpgroup may pass it on only when it has the
  // next tile's K, and a producer that copies that tile itself begins when it has found room for all of this tile's
  // masks.
  __device__ __forceinline__ void pass_masks() {
    if constexpr (C::kGeneral) {
      for (int i = 0; i < masks_per_tile(params.masks); ++i) release_mask(await_mask(i));
      ++mask_tiles;
    }
  }

  // Block `which` of a mask tensor for this warpgroup's tile.
  __device__ __forceinline__ MaskSlot<C> await_mask(int which) {
    const MaskSlot<C> slot(params.masks, shared.mask, mask_tiles, index, which);
    ptx::mbarrier_wait(slot.full, slot.full_parity);
    return slot;
  }
  // Where threads write the next block every lane arrives for itself. One could for its warp, but racecheck does not
  // follow that.
  __device__ __forceinline__ void release_mask(const MaskSlot<C>& slot) {
    __syncwarp();  // every lane has read its share
    ptx::mbarrier_arrive_if(slot.empty, params.masks.by_tma != 0 ? leader : 1u);
  }

  __device__ __forceinline__ std::uint32_t take_q(const std::uint8_t* panels) {
    return products.take_q(params.scales, panels, row_in_tile() & ~15, lane());
  }

  // What of Q belongs in registers; the rest is scaled already. Its buffer is then free, where `keep` is false: else
  // for results first.
  __device__ __forceinline__ void load_q(int item_number, bool keep = false) {
    if constexpr (C::kQInRegisters) {
      const std::uint32_t loaded_zero = take_q(shared.q[item_number % C::kQBuffers]);
      __syncwarp();  // every lane has read its share
      if (!keep) release_q(item_number, loaded_zero);
    } else if constexpr (C::kQEntries > 0) {
      Base::pass_entry([&] { return take_q(shared.k[ring.stage]); });
    }
  }

  // The scores of an item's first tile, which is in `stage`.
  __device__ __forceinline__ void issue_first_scores(int stage, int item_number) {
    ptx::wgmma_fence();
    products.issue_scores(stage, item_number);
    ptx::wgmma_commit();
  }

  // Of the block that tile `tile_index` is in.
  __device__ __forceinline__ int first_key() const {
    return item(number).first_block * tile::kBlockKeys + tile_index / C::kTilesPerBlock * block_step<C>(params.work);
  }

  // Calls run.operator()<h>() for what of tile `tile_index` is hidden.
  template <typename Run>
  __device__ __forceinline__ void with_hidden(Run run) {
    switch (hidden()) {
      case Hidden::nothing:
        run.template operator()<Hidden::nothing>();
        return;
      case Hidden::lower:
        if constexpr (C::kSplitsBlocks) run.template operator()<Hidden::lower>();
        return;
      case Hidden::upper:
        if constexpr (C::kSplitsBlocks) run.template operator()<Hidden::upper>();
        return;
      case Hidden::anything:
        run.template operator()<Hidden::anything>();
        return;
    }
  }

  // General variant: the scores of tile `tile_index`, with all masks applied.
  __device__ __forceinline__ void mask_scores() {
    const MaskLane lane{row_in_tile() % tile::kMaskRows, thread() & 3, tile_index % C::kTilesPerBlock};
    const bool consecutive = params.keys.pair_step == 1;
    if (params.masks.bias.data != nullptr) {
      const MaskSlot<C> slot = await_mask(0);
      if (consecutive) {
        pack_biased<C, C::kConsecutiveKeys>(masked, products.scores, params.masks.bias_bytes, params.scales.bias_scale,
                                            slot.block, lane);
      } else {
        pack_biased<C, C::kInterleavedKeys>(masked, products.scores, params.masks.bias_bytes, params.scales.bias_scale,
                                            slot.block, lane);
      }
      release_mask(slot);
    } else {
      pack_scores<C>(masked, products.scores);
    }
    if (params.masks.allowed.data != nullptr) {
      const MaskSlot<C> slot = await_mask(masks_per_tile(params.masks) - 1);
      if (consecutive) {
        mask_hidden<C, C::kConsecutiveKeys>(masked, slot.block, lane);
      } else {
        mask_hidden<C, C::kInterleavedKeys>(masked, slot.block, lane);
      }
      release_mask(slot);
    }
    ++mask_tiles;
    if (!is_interior()) mask_band<C>(masked, packed_scores<Hidden::anything>());
  }

  // What of tile `tile_index` is hidden from the warpgroup's rows.
  __device__ __forceinline__ Hidden hidden() const {
    if (is_interior()) return Hidden::nothing;
    if (!C::kSplitsBlocks || params.keys.pair_step == 1) return Hidden::anything;  // consecutive groups
    const auto& current = item(number);
    const int key = uniform(first_key());
    const int position = uniform(current.row_begin + current.diagonal) + index * 64 - key;  // of the first row
    const int last = uniform(current.key_length) - key - 1;
    return tile::hidden_of_border(position, 64, last, params.work.left, params.work.right);
  }

  template <Hidden kHidden>
  __device__ __forceinline__ PackedScores<C, kHidden> packed_scores() const {
    if constexpr (kHidden == Hidden::nothing) {
      return {products.scores};
    } else {
      const auto& current = item(number);
      const int key = first_key();
      const int row = current.row_begin + row_in_tile();
      return {products.scores,
              params.keys,
              params.work.left,
              params.work.right,
              tile_index % C::kTilesPerBlock,
              thread() & 3,
              row + current.diagonal - key,
              current.key_length - key};
    }
  }

  // Before the weights of a tile are used: were they too large for the reference, or had a row none, the reference is
  // raised and the tile weighed again.
  __device__ __forceinline__ void settle() {
    if (!weigher.weights_fit()) {
      // The scores change their names, else the compiler keeps what both passes compute alike.
      if constexpr (C::kGeneral) {
#pragma unroll
        for (std::uint32_t& word : masked.words) ptx::pin(word);
        weigher.weigh_again(masked, products);
      } else {
#pragma unroll
        for (float& score : products.scores) score *= params.scales.opaque_one;
        constexpr Hidden kHidden = C::kFull ? Hidden::nothing : Hidden::anything;
        weigher.weigh_again(packed_scores<kHidden>(), products);
      }
    }
    weigher.add_weights();
  }

  // Output of the tile before, scores and weights of tile `tile_index`.
  template <Hidden kHidden>
  __device__ __forceinline__ void next_tile(int accumulate) {
    TileRing next = ring;
    next.advance(stages);
    products.pin_weights();
    ping_pong().await();
    ptx::wgmma_fence();
    products.issue_scores(next.stage, number);
    ptx::wgmma_commit();
    products.issue_output(ring.stage, accumulate);
    ptx::wgmma_commit();
    ping_pong().pass_on();
    ptx::wgmma_wait<1>();
    release(shared.k_empty, next);
    look_ahead(next);
    const auto finish_output = [&] {
      // Needed a little later; here its loop keeps the compiler from moving the wait for the output product, which
      // follows, up past the selection.
      if constexpr (C::kHeldSlices > 1) await_k(next);
      ptx::wgmma_wait<0>();
      release(shared.v_empty, ring);
    };
    if constexpr (C::kGeneral) {
      mask_scores();
      weigher.weigh(masked, products, finish_output);
    } else if constexpr (kHidden == Hidden::nothing) {
      weigher.weigh_inner(packed_scores<kHidden>(), products, finish_output);
    } else {
#ifdef V_DIAG
      weigher.weigh_inner(packed_scores<kHidden>(), products, finish_output);
#else
      weigher.weigh(packed_scores<kHidden>(), products, finish_output);
#endif
    }
    ring = next;
    await_tile();
  }

  // Looks whether the V of the tile at `at` and the K of the one after have arrived: await_tile() then need not ask.
  __device__ __forceinline__ void look_ahead(const TileRing& at) {
    TileRing after = at;
    after.advance(stages);
    k_ready = after.test_full(shared.k_full);
    v_ready = at.test_full(shared.v_full);
  }
  // What the next step needs: V of this tile, K of the next, if there is one.
  __device__ __forceinline__ void await_tile() {
    if (v_ready == 0) ring.await_full(shared.v_full);
    await_k(ring);
  }
  __device__ __forceinline__ void await_k(const TileRing& at) {
    TileRing after = at;
    after.advance(stages);
    if (k_ready == 0 && tile_index + 1 < tile_end) after.await_full(shared.k_full);
    k_ready = 1;
  }

  // Writes the item's output rows. kStaged: by way of shared memory, where the buffer for them is free but for what TMA
  // still has to read of the last ones.
  template <bool kStaged>
  __device__ __forceinline__ void write_rows(const RowSums& sums) {
    const auto& current = item(number);
    if constexpr (kStaged) {
      const OutTile to = out_tile(current, warp_row());
      if (has_out_buffer()) await_staged();
      const std::uint8_t* own = C::kOutReusesQ ? shared.v[C::kStages - 1] : shared.out;
      const std::uint32_t tile =
          ptx::shared_address(has_out_buffer() ? own : shared.q[0]) + static_cast<std::uint32_t>(to.warp_row) * 128;
      stage_rows<C>(tile, lane(), products.out, sums);
      send_rows<C>(params.out, params.out_map, params.tma_out != 0, params.work.cumulative_q.present(),
                   params.vector_out, current, to, tile, lane());
    } else {
      const RowTargets to = targets_of(params.out, LseView{}, current, row_in_tile());
      store_rows_16bit<C>(params.out, params.vector_out, to, lane(), products.out, sums);
    }
  }
  // The same in fp32, for results that are to be merged with others.
  __device__ __forceinline__ void write_partial_rows(const RowSums& sums) {
    const RowTargets to = targets_of(params.out, LseView{}, item(number), row_in_tile());
    store_rows_fp32<InFp32<C>>(params.out, params.vector_out, to, lane(), products.out, sums);
  }
  // Of an item's rows, when all its weights are known: their sums, and those of pruned keys, which are part of them.
  __device__ __forceinline__ RowSums sum_up_rows(RowSums& rest) {
    weigher.recall_references();
    RowSums sums = sum_up(weigher.state);
    if constexpr (C::kRestMean) {
      rest = sum_up(weigher.rest, weigher.state);
      sums.sum0 += rest.sum0;
      sums.sum1 += rest.sum1;
    }
    return sums;
  }
  // When the item's output is known: what the pruned keys bring.
  __device__ __forceinline__ void add_rest(const RowSums& rest) {
    if constexpr (C::kRestMean) {
      if constexpr (kStagesMeans<C>) {
        shared.means.await(number);
        RowMeans staged;
        if (shared.means.find(row_in_tile(), lane(), staged)) {
          add_means<C>(staged, rest, products.out);
          return;
        }
      }
      ptx::wait_for_kernels_before();  // the means are written
      const RowMeans means = row_means<C>(params.means, params.work, item(number), row_in_tile(), lane());
      add_means<C>(means, rest, products.out);
    }
  }
  // When the item's means have been added, or none of its rows here sees a key.
  __device__ __forceinline__ void release_means() {
    if constexpr (kStagesMeans<C>) shared.means.release(leader);
  }
  // Results have a buffer of their own in shared memory: not that of Q.
  __device__ __forceinline__ bool has_out_buffer() const {
    return C::kOutReusesQ ? stages < C::kStages : C::kStagesOutput;
  }
  // Until TMA has read the warp's last results from shared memory.
  __device__ __forceinline__ void await_staged() {
    if (C::kStagesOutput && leader != 0) ptx::tma_store_wait_read();
    __syncwarp();
  }
  // Gives back the buffer of an item's Q, which the results of the item before have taken.
  __device__ __forceinline__ void free_q(int item_number) {
    if (C::kOutReusesQ && q_taken != 0) {
      await_staged();
      release_q(item_number);
      q_taken = 0;
    }
  }
  // An item none of whose rows here sees a key.
  __device__ __forceinline__ void write_empty() {
    if constexpr (kStagesMeans<C>) shared.means.await(number);
    release_means();
    store_zeros<C>(params.out, item(number), row_in_tile() & ~15, lane());
    store_lse<C>(params.lse, params.scales, item(number), row_in_tile(), lane(), {0, 0}, empty_rows());
  }

  // All tiles of the item from its first scores on; true when the next item's first scores are computed already.
  __device__ __forceinline__ bool run_item() {
    look_ahead(ring);
    if constexpr (C::kGeneral) {
      mask_scores();
      weigher.first_tile(masked, products);
    } else {
      with_hidden([&]<Hidden kHidden> { weigher.first_tile(packed_scores<kHidden>(), products); });
    }
    free_q(number);
    await_tile();
    int accumulate = 0;
#pragma unroll 1
    for (;;) {
      settle();
      if (++tile_index >= tile_end) break;
      if (C::kGeneral || !is_interior()) {
        if constexpr (C::kGeneral) {
          next_tile<Hidden::anything>(accumulate);
        } else {
          with_hidden([&]<Hidden kHidden> {
            if constexpr (kHidden != Hidden::nothing) next_tile<kHidden>(accumulate);
          });
        }
        accumulate = 1;
        continue;
      }
      // A run of tiles that need no masking has a loop of its own, which nothing rare interrupts: up to 6 % faster than
      // one loop with a branch for either kind (docs/log/forward.md).
      const int stop = uniform(min(tile_end, interior.end * C::kTilesPerBlock));
#pragma unroll 1
      for (;;) {
        next_tile<Hidden::nothing>(accumulate);
        accumulate = 1;
        if (!weigher.weights_fit(tile_index + 1 < stop)) break;
        weigher.add_weights();
        ++tile_index;
      }
    }
    if constexpr (!C::kQInRegisters) release_q(number);
    products.pin_weights();
    ping_pong().await();
    ptx::wgmma_fence();
    products.issue_output(ring.stage, accumulate);
    ptx::wgmma_commit();
    ping_pong().pass_on();
    // While the tensor core works on the last output: all that does not need it.
    RowSums rest;
    const RowSums sums = sum_up_rows(rest);
    const int trailing = skip_after;
    // Results in fp32 are written between two items: their code then stands once, and the common way is as it is.
    const bool chains = C::kChainsItems && trailing == 0 && !in_fp32<C>(params.out);
    const bool chained = chains && Base::next_item(number + 1) && skip_before == 0 && tile_end > tile_index;
    TileRing next = ring;
    next.advance(stages);
    if (chained) {
      // A short next item needs its successor's Q soon: then Q's buffer is free at once, not taken by results.
      const bool in_place = C::kOutReusesQ && !has_out_buffer() && tile_end - tile_index >= 3;
      load_q(number + 1, in_place);
      next.await_full(shared.k_full);
      issue_first_scores(next.stage, number + 1);
      ptx::wgmma_wait<1>();
      release(shared.v_empty, ring);
      // While the tensor core works on the scores. Results may take Q's buffer: the next one has left it.
      add_rest(rest);
      if (in_place || has_out_buffer()) {
        write_rows<C::kStagesOutput>(sums);
      } else {
        write_rows<false>(sums);
      }
      release_means();
      q_taken = in_place ? 1 : 0;
      // After the results, whose way to TMA leads past a fence: it would wait for these stores.
      store_lse<C>(params.lse, params.scales, item(number), row_in_tile(), lane(), sums, weigher.state);
      ptx::wgmma_wait<0>();
      release(shared.k_empty, next);
    } else {
      ptx::wgmma_wait<0>();
      release(shared.v_empty, ring);
      add_rest(rest);
      if (in_fp32<C>(params.out)) {
        write_partial_rows(sums);
      } else {
        write_rows<C::kStagesOutput && !C::kOutReusesQ>(sums);
      }
      release_means();
      store_lse<C>(params.lse, params.scales, item(number), row_in_tile(), lane(), sums, weigher.state);
    }
    ptx::wgmma_wait<0>();  // asked for where the two ways meet (C7515)
    ++number;
    ring = next;
    if (!chained) skip_entries(trailing);
    return chained;
  }

  __device__ __forceinline__ void end() { await_staged(); }  // before the CTA's shared memory is gone
};

}  // namespace dspattn::cuda::sm90
