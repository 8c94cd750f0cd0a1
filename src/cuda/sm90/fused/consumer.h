// A consumer warpgroup of the fused kernel: 64 query rows of each item against the item's key tiles.
//
// The scores of tile j+1 and the output of tile j are issued to the tensor core together; while the output product
// runs, the scores of tile j+1 are selected and exponentiated. Beside the last output product of an item the next one
// is prepared, and beside that one's first scores the results are written.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_shapes.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/mask_load.h"
#include "cuda/sm90/fused/mask_words.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused/softmax.h"
#include "cuda/sm90/fused/store.h"

namespace dspattn::cuda::sm90 {

template <typename C>
struct Consumer {
  static constexpr int kQuarters = C::kQuarters;  // 64 keys: one metadata word
  static constexpr int kScoreSteps = C::kScoreSteps;
  static constexpr int kValueSteps = C::kTileK / 32;

  const FusedParams& params;
  Shared<C>& shared;
  int index;             // of this warpgroup among the consumers
  int stages;            // of the ring
  std::uint32_t leader;  // of its warp: every warp arrives for itself, having passed its own waits
  tile::QuadTranspose transpose;
  std::uint32_t k_low, v_low, q_low;  // low words of operand descriptors

  Ring<C::kStages> ring;             // of the tile whose V comes next
  int number = 0;                    // of the item in work, among this block's
  int tile_index = 0, tile_end = 0;  // own tiles of the item, counted from the sequence's first key
  tile::BlockRange interior;
  int skip_before = 0, skip_after = 0;  // entries of the ring that only other warpgroups need

  float scores[C::kTileK / 2];
  float out[C::kHeadDim / 2];
  std::uint32_t weights[C::kTileK / 8];
  std::uint32_t metadata[kQuarters];
  PackedWords<C> masked;            // general variant only: the last tile's scores
  int mask_tiles = 0;               // general variant only: tiles so far
  std::uint32_t q[kScoreSteps][4];  // its first C::kQSteps steps
  RowState state;
  std::uint32_t k_ready = 0, v_ready = 0;  // whether the next tile's K and V were seen to be there already
  float tile0 = 0, tile1 = 0;              // sums of the last tile's weights, not yet in `state`
  std::uint32_t q_taken = 0;               // results of the last item are in the place of Q

  __device__ __forceinline__ Consumer(const FusedParams& p, Shared<C>& s, int warpgroup)
      : params(p), shared(s), index(warpgroup), stages(stages_of<C>(p)) {
    leader = (thread() & 31) == 0 ? 1u : 0u;
    transpose = tile::QuadTranspose::of_lane(thread() & 3);
    ptx::pin(transpose.rotation);
    ptx::pin(transpose.own);
    ptx::pin(transpose.selector);
    ptx::pin(leader);
    q_low = ptx::descriptor_low(ptx::shared_address(shared.q) + static_cast<std::uint32_t>(index) * 64 * 128, 16);
    k_low = ptx::descriptor_low(ptx::shared_address(shared.k), 16);
    v_low = ptx::descriptor_low(ptx::shared_address(shared.v), C::kPanelKBytes);
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
  __device__ __forceinline__ void release(std::uint64_t* barriers, const Ring<C::kStages>& at) {
    ptx::mbarrier_arrive_if(ptx::shared_address(barriers) + 8u * static_cast<std::uint32_t>(at.stage), leader);
  }
  __device__ __forceinline__ void release_q(int of) {
    ptx::mbarrier_arrive_if(ptx::shared_address(&shared.q_empty[of % C::kQBuffers]), leader);
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

  // Waits for the announcement of an item and for its Q, and takes note of this warpgroup's share; false after the
  // last.
  __device__ __forceinline__ bool next_item(int of) {
    const std::uint64_t* ready = C::kQInRegisters ? shared.q_full : shared.q_scaled;
    ptx::mbarrier_wait(ptx::shared_address(ready + of % C::kQBuffers), of / C::kQBuffers & 1);
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

  // Goes past the next entry of the ring; use() may read the stage of K. No product brings a warp's lanes together
  // between a wait and the leader's arrival: a lane that lags could find the phase it waits for two phases gone.
  template <typename Use>
  __device__ __forceinline__ void pass_entry(Use use) {
    wait_full(shared.k_full, ring);
    use();
    __syncwarp();  // every lane has seen it
    release(shared.k_empty, ring);
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
      pass_entry([] {});
    }
  }

  // Block `which` of a mask tensor for this warpgroup's tile.
  __device__ __forceinline__ MaskPlace<C> await_mask(int which) {
    const MaskPlace<C> place(params, shared, mask_tiles, index, which);
    ptx::mbarrier_wait(place.full, place.full_parity);
    return place;
  }
  __device__ __forceinline__ void release_mask(const MaskPlace<C>& place) {
    __syncwarp();  // every lane has read its share
    ptx::mbarrier_arrive_if(place.empty, leader);
  }

  // Takes Q's first C::kQSteps steps times 2^-e to registers, in the layout of a wgmma A operand.
  __device__ __forceinline__ void take_q(const std::uint8_t* panels) {
    // Lane l addresses row l % 16 of the warp's, and of 16 columns the first or the last eight.
    const auto lane_row = static_cast<std::uint32_t>((row_in_tile() & ~15) + (lane() & 15));
    const std::uint32_t row = ptx::shared_address(panels) + lane_row * 128;
    const std::uint32_t chunk = (static_cast<std::uint32_t>(lane() >> 4) ^ (lane_row & 7)) << 4;
#pragma unroll
    for (int step = 0; step < C::kQSteps; ++step) {
      const std::uint32_t panel = static_cast<std::uint32_t>(step / 4) * C::kPanelQBytes;
      ptx::load_matrices(row + panel + (chunk ^ static_cast<std::uint32_t>(step % 4) << 5), q[step]);
#pragma unroll
      for (std::uint32_t& pair : q[step]) pair = multiply_pairs<C>(pair, params.q_scale);
    }
  }

  // What of Q belongs in registers; the rest is scaled already. Its place in shared memory is then free, for results
  // first where there is no other place for them.
  __device__ __forceinline__ void load_q(int of) {
    if constexpr (C::kQInRegisters) {
      take_q(shared.q[of % C::kQBuffers]);
      __syncwarp();  // every lane has read its share
      if constexpr (!C::kOutInPlaceOfQ) release_q(of);
    } else if constexpr (C::kQEntries > 0) {
      pass_entry([&] { take_q(shared.k[ring.stage]); });
    }
  }

  __device__ __forceinline__ void issue_scores(int stage, int of) {
    const std::uint32_t k = k_low + static_cast<std::uint32_t>(stage) * (C::kTileKBytes >> 4);
#pragma unroll
    for (int step = 0; step < kScoreSteps; ++step) {
      const std::uint64_t b = ptx::descriptor(k + (step / 4) * (C::kPanelKBytes >> 4) + (step % 4) * 2);
      if (step < C::kQSteps) {
        if (step == 0) {
          ptx::wgmma_dense_first<C::kType>(scores, q[step], b);
        } else {
          ptx::wgmma_dense<C::kType>(scores, q[step], b);
        }
      } else {
        const std::uint32_t low = q_low + static_cast<std::uint32_t>(of % C::kQBuffers) * (C::kTileQBytes >> 4);
        const std::uint64_t a =
            ptx::descriptor(low + (step / 4 - C::kQPanelsByRing) * (C::kPanelQBytes >> 4) + (step % 4) * 2);
        if (step == 0) {
          ptx::wgmma_dense_first<C::kType>(scores, a, b);
        } else {
          ptx::wgmma_dense<C::kType>(scores, a, b);
        }
      }
    }
  }

  __device__ __forceinline__ void issue_output(int stage, int accumulate) {
    const std::uint32_t v = v_low + static_cast<std::uint32_t>(stage) * (C::kTileKBytes >> 4);
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const std::uint64_t b = ptx::descriptor(v + step * (32 * 128 >> 4));
      const std::uint32_t* a = weights + 4 * step;
      if (step % 2 == 0) {
        ptx::wgmma_sparse<C::kType, 0>(out, a[0], a[1], a[2], a[3], b, metadata[step / 2], step > 0 ? 1 : accumulate);
      } else {
        ptx::wgmma_sparse<C::kType, 1>(out, a[0], a[1], a[2], a[3], b, metadata[step / 2], 1);
      }
    }
  }

  // The weights and metadata a product will read are computed before its fence, not sunk below it.
  __device__ __forceinline__ void pin_weights() {
#pragma unroll
    for (int i = 0; i < C::kTileK / 8; ++i) ptx::pin(weights[i]);
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) ptx::pin(metadata[i]);
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
        pack_biased<C, C::kConsecutiveKeys>(masked, scores, params, place.block, lane);
      } else {
        pack_biased<C, C::kInterleavedKeys>(masked, scores, params, place.block, lane);
      }
      release_mask(place);
    } else {
      pack_scores<C>(masked, scores);
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
    const int key = tile_index / C::kTilesPerBlock * tile::kBlockKeys;
    const int position = uniform(of.row_begin + of.diagonal) + index * 64 - key;  // of the first row
    const int last = uniform(of.key_length) - key - 1;
    return tile::hidden_of_border(position, 64, last, params.left, params.right);
  }

  template <Hidden kHidden>
  __device__ __forceinline__ PackedScores<C, kHidden> packed_scores() const {
    if constexpr (kHidden == Hidden::nothing) {
      return {scores};
    } else {
      const auto& of = item(number);
      const int key = tile_index / C::kTilesPerBlock * tile::kBlockKeys;
      const int row = of.row_begin + row_in_tile();
      return {
          scores, params, tile_index % C::kTilesPerBlock, thread() & 3, row + of.diagonal - key, of.key_length - key};
    }
  }

  // Selects and exponentiates the tile, unit by unit: the exponentials of one run beside the selection of the next, on
  // other pipes. The results are operands of the output product: before_write() must see to it that the product that
  // reads the old ones is done.
  template <typename Packed, typename How, typename BeforeWrite>
  __device__ __forceinline__ void weigh(const Packed& packed, const How& exponents, BeforeWrite before_write) {
    constexpr int kUnits = C::kTileK / 32;
    constexpr int kHeld = C::kHeldUnits;
    constexpr bool kTakesLower = std::is_same_v<Packed, PackedScores<C, Hidden::lower>>;
    Unit units[2];
    tile::KeptPair pairs[2];
    std::uint32_t word[2] = {}, across[2] = {};
    float values[kHeld][8];
    const auto write = [&](int u, const float* value) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[4 * u + i] = C::kType == DType::bf16 ? ptx::pack_bf16x2(value[2 * i], value[2 * i + 1])
                                                     : ptx::pack_f16x2(value[2 * i], value[2 * i + 1]);
      }
      if (u % 2 == 0) return;
      if constexpr (kTakesLower) {
        metadata[u / 2] = C::kSelection == Selection::two_of_four ? tile::kLowerTwoOfFour : tile::kLowerOneOfTwo;
      } else {
        metadata[u / 2] = transpose.exchange_halves(word[u / 2 % 2], across[u / 2 % 2]);
      }
    };
    const auto select = [&]<int kUnit>() {
      if constexpr (kTakesLower) {
        take_unit<C, kUnit>(packed, units[kUnit % 2]);
      } else {
        pairs[kUnit % 2] = select_unit<C, kUnit>(packed, units[kUnit % 2]);
      }
    };
    select.template operator()<0>();
    [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
      (
          [&] {
            constexpr int u = kIndex;
            if constexpr (u + 1 < kUnits) select.template operator()<u + 1>();
            const Unit& unit = units[u % 2];
            float* value = values[u < kHeld ? u : 0];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              exponents.weigh(unit.first[i], unit.second[i], value + 4 * i);
              tile0 += value[4 * i] + value[4 * i + 1];
              tile1 += value[4 * i + 2] + value[4 * i + 3];
            }
            if constexpr (u % 2 == 0 && !kTakesLower) {
              const std::uint32_t codes = C::kSelection == Selection::two_of_four
                                              ? tile::metadata_two_of_four(pairs[0], pairs[1])
                                              : tile::metadata_one_of_two(pairs[0], pairs[1]);
              word[u / 2 % 2] = transpose.exchange_pairs(codes, __shfl_xor_sync(~0u, codes, 1));
              across[u / 2 % 2] = __shfl_xor_sync(~0u, word[u / 2 % 2], 2);
            }
            if constexpr (u == kHeld - 1) {
              before_write();
#pragma unroll
              for (int held = 0; held < kHeld; ++held) write(held, values[held]);
            } else if constexpr (u >= kHeld) {
              write(u, value);
            }
          }(),
          ...);
    }
    (std::make_integer_sequence<int, kUnits>{});
  }

  // How a tile is weighed, and how once more where that was not good enough.
  __device__ __forceinline__ Exponents precise_exponents() const { return Exponents::of<C>(params, state); }
  __device__ __forceinline__ auto exponents() const {
    if constexpr (C::kHalfExponentials) {
      return HalfExponents{params.exp2_scale_half, state.minus};
    } else {
      return precise_exponents();
    }
  }

  // Weighs tile `tile_index` of the item.
  template <Hidden kHidden, typename BeforeWrite>
  __device__ __forceinline__ void weigh_tile(BeforeWrite before_write) {
    tile0 = tile1 = 0;
    weigh(packed_scores<kHidden>(), exponents(), before_write);
  }

  // Sets the reference to the tile's largest score, or a sample of them, and weighs the tile. settle() mends what a
  // sample misses.
  template <typename Packed>
  __device__ __forceinline__ void first_tile(const Packed& packed) {
    state = {0, 0, NAN, NAN, ~0u};
    tile0 = tile1 = 0;
    if constexpr (C::kGeneral) {
      const Raised raised = raise_reference<C>(packed, params, state);
      weigh(packed, exponents(), [] {});
      forget_unset(raised, state);
    } else {
      sample_reference<C>(packed, params, state);
      weigh(packed, exponents(), [] {});
    }
  }

  // Whether the last tile's weights are small enough; not when a row had no reference, which made them NaN.
  __device__ __forceinline__ bool weights_fit() const {
    return __all_sync(~0u, tile0 < C::kWeightLimit && tile1 < C::kWeightLimit) != 0;
  }
  __device__ __forceinline__ void add_weights() {
    state.sum0 += tile0;
    state.sum1 += tile1;
  }

  // Before the weights of a tile are used: were they too large for the reference, or had a row none, the reference is
  // raised and the tile weighed again.
  __device__ __forceinline__ void settle() {
    if (!weights_fit()) {
      // The scores change their names, else the compiler keeps what both passes compute alike.
      if constexpr (C::kGeneral) {
#pragma unroll
        for (std::uint32_t& word : masked.words) ptx::pin(word);
        weigh_again(masked);
      } else {
#pragma unroll
        for (float& score : scores) score *= params.one;
        weigh_again(packed_scores<Hidden::anything>());
      }
    }
    add_weights();
  }

  template <typename Packed>
  __device__ __forceinline__ void weigh_again(const Packed& packed) {
    const Raised raised = raise_reference<C>(packed, params, state);
    shrink(raised);
    tile0 = tile1 = 0;
    weigh(packed, precise_exponents(), [] {});
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

  // Output of the tile before, scores and weights of tile `tile_index`.
  template <Hidden kHidden>
  __device__ __forceinline__ void next_tile(int accumulate) {
    Ring<C::kStages> next = ring;
    next.advance(stages);
    pin_weights();
    take_turn();
    ptx::wgmma_fence();
    issue_scores(next.stage, number);
    ptx::wgmma_commit();
    issue_output(ring.stage, accumulate);
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
      tile0 = tile1 = 0;
      weigh(masked, exponents(), finish_output);
    } else {
      weigh_tile<kHidden>(finish_output);
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
      stage_rows<C>(tile, lane(), out, sums);
      send_rows<C>(params, of, place, tile, lane());
    } else {
      store_rows<C>(params, of, row_in_tile(), lane(), out, sums);
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
      first_tile(masked);
    } else {
      with_hidden([&]<Hidden kHidden> { first_tile(packed_scores<kHidden>()); });
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
      const int stop = min(tile_end, interior.end * C::kTilesPerBlock);
#pragma unroll 1
      for (;;) {
        next_tile<Hidden::nothing>(accumulate);
        accumulate = 1;
        if (tile_index + 1 >= stop || !weights_fit()) break;
        add_weights();
        ++tile_index;
      }
    }
    if constexpr (!C::kQInRegisters) release_q(number);
    pin_weights();
    take_turn();
    ptx::wgmma_fence();
    issue_output(ring.stage, accumulate);
    ptx::wgmma_commit();
    pass_turn();
    // While the tensor core works on the last output: all that does not need it.
    const RowSums sums = sum_up(state);
    store_lse<C>(params, item(number), row_in_tile(), lane(), sums, state);
    const int trailing = skip_after;
    const bool chained =
        C::kChainsItems && trailing == 0 && next_item(number + 1) && skip_before == 0 && tile_end > tile_index;
    Ring<C::kStages> next = ring;
    next.advance(stages);
    if (chained) {
      // A short next item needs its successor's Q soon: then the place of Q is free at once, not taken by results.
      const bool in_place = C::kOutInPlaceOfQ && !has_out_place() && tile_end - tile_index >= 3;
      load_q(number + 1);
      if (C::kOutInPlaceOfQ && !in_place) release_q(number + 1);
      wait_full(shared.k_full, next);
      ptx::wgmma_fence();
      issue_scores(next.stage, number + 1);
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
      ptx::wgmma_wait<0>();
      release(shared.k_empty, next);
    } else {
      ptx::wgmma_wait<0>();
      release(shared.v_empty, ring);
      write_rows<C::kStagesOutput && !C::kOutInPlaceOfQ>(sums);
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
      if constexpr (C::kOutInPlaceOfQ) release_q(number);
      skip_entries(skip_before);
      wait_full(shared.k_full, ring);
      ptx::wgmma_fence();
      issue_scores(ring.stage, number);
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
