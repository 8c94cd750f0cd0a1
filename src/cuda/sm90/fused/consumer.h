// A consumer warpgroup of the fused kernel: 64 query rows of each item against the item's key tiles.
//
// The scores of tile j+1 and the output of tile j are issued to the tensor core together; while the output product
// runs, the scores of tile j+1 are selected and exponentiated. Beside the last output product of an item the next one
// is prepared, and beside that one's first scores the results are written.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/mask_load.h"
#include "cuda/sm90/fused/mask_words.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused/products.h"
#include "cuda/sm90/fused/softmax.h"
#include "cuda/sm90/fused/store.h"
#include "cuda/sm90/fused/weigh.h"
#include "cuda/sm90/fused/work.h"

namespace dspattn::cuda::sm90 {

template <typename C>
struct Consumer {
  const FusedParams& params;
  Shared<C>& shared;
  int index;             // of this warpgroup among the consumers
  int stages;            // of the ring
  std::uint32_t leader;  // of its warp: every warp arrives for itself, having passed its own waits

  Ring<C::kStages> ring;             // of the tile whose V comes next
  int number = 0;                    // of the item in work, among this block's
  int tile_index = 0, tile_end = 0;  // own tiles of the item, counted as they come
  tile::BlockRange interior;
  int skip_before = 0, skip_after = 0;  // entries of the ring that only other warpgroups need

  Weigher<C> weigher;
  Products<C> products;
  PackedWords<C> masked;                   // general variant only: the last tile's scores
  int mask_tiles = 0;                      // general variant only: tiles so far
  std::uint32_t k_ready = 0, v_ready = 0;  // whether the next tile's K and V were seen to be there already
  std::uint32_t q_taken = 0;               // results of the last item are in the place of Q

  __device__ __forceinline__ Consumer(const FusedParams& p, Shared<C>& s, int warpgroup)
      : params(p),
        shared(s),
        index(warpgroup),
        stages(stages_of<C>(p)),
        leader(lane() == 0 ? 1u : 0u),
        weigher(p, lane()) {
    ptx::pin(leader);
    products.point_to(shared, index);
  }

  // Computed where they are needed, which is rarely: registers are short.
  __device__ __forceinline__ static int thread() { return ptx::opaque(static_cast<int>(threadIdx.x)) & 127; }
  __device__ __forceinline__ static int lane() { return thread() & 31; }
  __device__ __forceinline__ int row_in_tile() const {
    const int of_warpgroup = thread();
    return index * 64 + (of_warpgroup >> 5) * 16 + ((of_warpgroup & 31) >> 2);
  }
  // The first of the warp's rows; uniform.
  __device__ __forceinline__ int warp_row() const { return index * 64 + uniform(thread() >> 5) * 16; }
  __device__ __forceinline__ const Item<C::kConsumers>& item(int of) const { return shared.items[of % kItemSlots]; }

  __device__ __forceinline__ static void wait_full(const std::uint64_t* barriers, const Ring<C::kStages>& at) {
    ptx::mbarrier_wait(ptx::shared_address(barriers) + 8u * static_cast<std::uint32_t>(at.stage), at.parity);
  }
  __device__ __forceinline__ static std::uint32_t test_full(const std::uint64_t* barriers, const Ring<C::kStages>& at) {
    return ptx::mbarrier_test(ptx::shared_address(barriers) + 8u * static_cast<std::uint32_t>(at.stage), at.parity);
  }
  // `come`: 0, once what was loaded from there has come.
  __device__ __forceinline__ void release(std::uint64_t* barriers, const Ring<C::kStages>& at, std::uint32_t come = 0) {
    ptx::mbarrier_arrive_if(ptx::shared_address(barriers) + 8u * static_cast<std::uint32_t>(at.stage) + come, leader);
  }
  __device__ __forceinline__ void release_q(int of, std::uint32_t come = 0) {
    ptx::mbarrier_arrive_if(ptx::shared_address(&shared.q_empty[of % C::kQBuffers]) + come, leader);
  }

  // The warpgroups issue their products in turn, one turn a tile.
  __device__ __forceinline__ void take_turn() {
    if constexpr (C::kTakeTurns) ptx::named_barrier_sync(kBarrierTurn + index, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (C::kTakeTurns) {
      ptx::named_barrier_arrive(kBarrierTurn + (index + 1 == C::kConsumers ? 0 : index + 1), 256);
    }
  }

  __device__ __forceinline__ void await_q(int of) const {
    const std::uint64_t* ready = C::kQInRegisters ? shared.q_full : shared.q_scaled;
    ptx::mbarrier_wait(ptx::shared_address(ready + of % C::kQBuffers), of / C::kQBuffers & 1);
  }

  // Waits for the announcement of an item and for its Q, and takes note of this warpgroup's share; false after the
  // last.
  __device__ __forceinline__ bool next_item(int of) {
    await_q(of);
    // Read together: one latency.
    const int valid = item(of).valid;
    const Share share = item(of).shares[index];
    tile_index = uniform(share.begin);
    tile_end = uniform(share.end);
    interior = {uniform(share.interior_begin), uniform(share.interior_end)};
    skip_before = uniform(share.skip_before);
    skip_after = uniform(share.skip_after);
    return uniform(valid) != 0;
  }

  // Goes past the next entry of the ring; use() may read the stage of K and returns 0 when that has come. No product
  // brings a warp's lanes together between a wait and the leader's arrival: a lane that lags could find the phase it
  // waits for two phases gone.
  template <typename Use>
  __device__ __forceinline__ void pass_entry(Use use) {
    wait_full(shared.k_full, ring);
    const std::uint32_t come = use();
    __syncwarp();  // every lane has seen it
    release(shared.k_empty, ring, come);
    take_turn();
    pass_turn();
    wait_full(shared.v_full, ring);
    __syncwarp();
    release(shared.v_empty, ring);
    ring.advance(stages);
  }

  // Entries that other warpgroups work on: only keep the pipeline moving.
  __device__ __forceinline__ void skip_entries(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      // Before the turn: it may come only when another warpgroup has the next tile's K, and a producer that copies that
      // tile itself begins when it has found room for all of this tile's masks.
      if constexpr (C::kGeneral) {
        for (int i = 0; i < masks_per_tile(params); ++i) release_mask(await_mask(i));
        ++mask_tiles;
      }
      pass_entry([] { return 0u; });
    }
  }

  // Block `which` of a mask tensor for this warpgroup's tile.
  __device__ __forceinline__ MaskPlace<C> await_mask(int which) {
    const MaskPlace<C> place(params, shared, mask_tiles, index, which);
    ptx::mbarrier_wait(place.full, place.full_parity);
    return place;
  }
  // Where threads write the next block every lane arrives for itself. One could for its warp, but racecheck does not
  // follow that.
  __device__ __forceinline__ void release_mask(const MaskPlace<C>& place) {
    __syncwarp();  // every lane has read its share
    ptx::mbarrier_arrive_if(place.empty, params.mask_engine != 0 ? leader : 1u);
  }

  __device__ __forceinline__ std::uint32_t take_q(const std::uint8_t* panels) {
    return products.take_q(params, panels, row_in_tile() & ~15, lane());
  }

  // What of Q belongs in registers; the rest is scaled already. Its place in shared memory is then free, where `keep`
  // is false: else for results first.
  __device__ __forceinline__ void load_q(int of, bool keep = false) {
    if constexpr (C::kQInRegisters) {
      const std::uint32_t come = take_q(shared.q[of % C::kQBuffers]);
      __syncwarp();  // every lane has read its share
      if (!keep) release_q(of, come);
    } else if constexpr (C::kQEntries > 0) {
      pass_entry([&] { return take_q(shared.k[ring.stage]); });
    }
  }

  // Of the block that tile `tile_index` is in.
  __device__ __forceinline__ int first_key() const {
    return item(number).first_block * tile::kBlockKeys + tile_index / C::kTilesPerBlock * block_step<C>(params);
  }

  // Whether every row sees all keys of tile `tile_index`.
  __device__ __forceinline__ bool is_interior() const {
    const int block = tile_index / C::kTilesPerBlock;
    return block >= interior.begin && block < interior.end;
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
    if (params.bias.data != nullptr) {
      const MaskPlace<C> place = await_mask(0);
      if (consecutive) {
        pack_biased<C, C::kConsecutiveKeys>(masked, products.scores, params, place.block, lane);
      } else {
        pack_biased<C, C::kInterleavedKeys>(masked, products.scores, params, place.block, lane);
      }
      release_mask(place);
    } else {
      pack_scores<C>(masked, products.scores);
    }
    if (params.allowed.data != nullptr) {
      const MaskPlace<C> place = await_mask(masks_per_tile(params) - 1);
      if (consecutive) {
        mask_hidden<C, C::kConsecutiveKeys>(masked, place.block, lane);
      } else {
        mask_hidden<C, C::kInterleavedKeys>(masked, place.block, lane);
      }
      release_mask(place);
    }
    ++mask_tiles;
    if (!is_interior()) mask_band<C>(masked, packed_scores<Hidden::anything>());
  }

  // What of tile `tile_index` is hidden from the warpgroup's rows.
  __device__ __forceinline__ Hidden hidden() const {
    if (is_interior()) return Hidden::nothing;
    if (!C::kSplitsBlocks || params.keys.pair_step == 1) return Hidden::anything;  // consecutive groups
    const auto& of = item(number);
    const int key = uniform(first_key());
    const int position = uniform(of.row_begin + of.diagonal) + index * 64 - key;  // of the first row
    const int last = uniform(of.key_length) - key - 1;
    return tile::hidden_of_border(position, 64, last, params.left, params.right);
  }

  template <Hidden kHidden>
  __device__ __forceinline__ PackedScores<C, kHidden> packed_scores() const {
    if constexpr (kHidden == Hidden::nothing) {
      return {products.scores};
    } else {
      const auto& of = item(number);
      const int key = first_key();
      const int row = of.row_begin + row_in_tile();
      return {products.scores,    params, tile_index % C::kTilesPerBlock, thread() & 3, row + of.diagonal - key,
              of.key_length - key};
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
        for (float& score : products.scores) score *= params.one;
        constexpr Hidden kHidden = C::kFull ? Hidden::nothing : Hidden::anything;
        weigher.weigh_again(packed_scores<kHidden>(), products);
      }
    }
    weigher.add_weights();
  }

  // Output of the tile before, scores and weights of tile `tile_index`.
  template <Hidden kHidden>
  __device__ __forceinline__ void next_tile(int accumulate) {
    Ring<C::kStages> next = ring;
    next.advance(stages);
    products.pin_weights();
    take_turn();
    ptx::wgmma_fence();
    products.issue_scores(next.stage, number);
    ptx::wgmma_commit();
    products.issue_output(ring.stage, accumulate);
    ptx::wgmma_commit();
    pass_turn();
    ptx::wgmma_wait<1>();
    release(shared.k_empty, next);
    look_ahead(next);
    const auto finish_output = [&] {
      // Needed a little later; here its loop keeps the compiler from moving the wait for the output product, which
      // follows, up past the selection.
      if constexpr (C::kHeldUnits > 1) await_k(next);
      ptx::wgmma_wait<0>();
      release(shared.v_empty, ring);
    };
    if constexpr (C::kGeneral) {
      mask_scores();
      weigher.weigh(masked, products, finish_output);
    } else {
      weigher.weigh(packed_scores<kHidden>(), products, finish_output);
    }
    ring = next;
    await_tile();
  }

  // Looks whether the V of the tile at `at` and the K of the one after have arrived: await_tile() then need not ask.
  __device__ __forceinline__ void look_ahead(const Ring<C::kStages>& at) {
    Ring<C::kStages> after = at;
    after.advance(stages);
    k_ready = test_full(shared.k_full, after);
    v_ready = test_full(shared.v_full, at);
  }
  // What the next step needs: V of this tile, K of the next, if there is one.
  __device__ __forceinline__ void await_tile() {
    if (v_ready == 0) wait_full(shared.v_full, ring);
    await_k(ring);
  }
  __device__ __forceinline__ void await_k(const Ring<C::kStages>& at) {
    Ring<C::kStages> after = at;
    after.advance(stages);
    if (k_ready == 0 && tile_index + 1 < tile_end) wait_full(shared.k_full, after);
    k_ready = 1;
  }

  // Writes the item's output rows. kStaged: by way of shared memory, where the place for them is free but for what the
  // copy engine still has to read of the last ones.
  template <bool kStaged>
  __device__ __forceinline__ void write_rows(const RowSums& sums) {
    const auto& of = item(number);
    if constexpr (kStaged) {
      const OutPlace place = out_place(of, warp_row());
      if (has_out_place()) await_staged();
      const std::uint8_t* own = C::kOutInPlaceOfQ ? shared.v[C::kStages - 1] : shared.out;
      const std::uint32_t tile =
          ptx::shared_address(has_out_place() ? own : shared.q[0]) + static_cast<std::uint32_t>(place.warp_row) * 128;
      stage_rows<C>(tile, lane(), products.out, sums);
      send_rows<C>(params, of, place, tile, lane());
    } else {
      store_rows<C>(params, of, row_in_tile(), lane(), products.out, sums);
    }
  }
  // Results have a place of their own in shared memory: not that of Q.
  __device__ __forceinline__ bool has_out_place() const {
    return C::kOutInPlaceOfQ ? stages < C::kStages : C::kStagesOutput;
  }
  // Until the copy engine has read the warp's last results from shared memory.
  __device__ __forceinline__ void await_staged() {
    if (C::kStagesOutput && leader != 0) ptx::tma_store_wait_read();
    __syncwarp();
  }
  // Gives back the place of item `of`'s Q, which the results of the item before have taken.
  __device__ __forceinline__ void free_q(int of) {
    if (C::kOutInPlaceOfQ && q_taken != 0) {
      await_staged();
      release_q(of);
      q_taken = 0;
    }
  }
  // An item none of whose rows here sees a key.
  __device__ __forceinline__ void write_empty() {
    store_zeros<C>(params, item(number), row_in_tile() & ~15, lane());
    store_lse<C>(params, item(number), row_in_tile(), lane(), {0, 0}, {0, 0, NAN, NAN, ~0u});
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
      // A run of tiles that need no masking has a loop of its own, which nothing rare interrupts: 2 to 8 % faster than
      // one loop with a branch for either kind (docs/fused_kernel.md).
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
    take_turn();
    ptx::wgmma_fence();
    products.issue_output(ring.stage, accumulate);
    ptx::wgmma_commit();
    pass_turn();
    // While the tensor core works on the last output: all that does not need it.
    const RowSums sums = sum_up(weigher.state);
    const int trailing = skip_after;
    const bool chained =
        C::kChainsItems && trailing == 0 && next_item(number + 1) && skip_before == 0 && tile_end > tile_index;
    Ring<C::kStages> next = ring;
    next.advance(stages);
    if (chained) {
      // A short next item needs its successor's Q soon: then the place of Q is free at once, not taken by results.
      const bool in_place = C::kOutInPlaceOfQ && !has_out_place() && tile_end - tile_index >= 3;
      load_q(number + 1, in_place);
      wait_full(shared.k_full, next);
      ptx::wgmma_fence();
      products.issue_scores(next.stage, number + 1);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      release(shared.v_empty, ring);
      // While the tensor core works on the scores. Results may take the place of Q: the next one has left it.
      if (in_place || has_out_place()) {
        write_rows<C::kStagesOutput>(sums);
      } else {
        write_rows<false>(sums);
      }
      q_taken = in_place ? 1 : 0;
      // After the results, whose way to the copy engine leads past a fence: it would wait for these stores.
      store_lse<C>(params, item(number), row_in_tile(), lane(), sums, weigher.state);
      ptx::wgmma_wait<0>();
      release(shared.k_empty, next);
    } else {
      ptx::wgmma_wait<0>();
      release(shared.v_empty, ring);
      write_rows<C::kStagesOutput && !C::kOutInPlaceOfQ>(sums);
      store_lse<C>(params, item(number), row_in_tile(), lane(), sums, weigher.state);
    }
    ptx::wgmma_wait<0>();  // asked for where the two ways meet (C7515)
    ++number;
    ring = next;
    if (!chained) skip_entries(trailing);
    return chained;
  }

  __device__ __forceinline__ void run() {
    if (C::kTakeTurns && index == C::kConsumers - 1) ptx::named_barrier_arrive(kBarrierTurn, 256);
#pragma unroll 1
    while (next_item(number)) {
      if (tile_end <= tile_index) {  // no row of this warpgroup sees a key
        release_q(number);
        skip_entries(skip_before);
        write_empty();
        ++number;
        continue;
      }
      load_q(number);
      skip_entries(skip_before);
      wait_full(shared.k_full, ring);
      ptx::wgmma_fence();
      products.issue_scores(ring.stage, number);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      release(shared.k_empty, ring);
#pragma unroll 1
      while (run_item()) {
      }
    }
    if (C::kTakeTurns && index == 0) ptx::named_barrier_sync(kBarrierTurn, 256);  // the last turn passed on
    await_staged();  // before the block's shared memory is gone
  }
};

}  // namespace dspattn::cuda::sm90
