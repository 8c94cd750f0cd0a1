// A key warpgroup of the fused backward: 64 keys of the CTA's key tile against every query tile that sees it.
//
//   S = K Q^T, pruned     P = exp(S - LSE)     dP = V dO^T     dS = P (dP - D)     dV += P dO     dK += dS Q
//
// All tiles have keys as rows, so that P and dS are operands of dV and dK as they lie in registers; dK and dV stay
// there too, for the whole walk over query tiles. dS goes to shared memory besides, for the query warpgroup's dQ.
// Where a head dim is too large for both gradients (Split::products), one warpgroup has the scores and dV, and hands
// the pruned scores to the other, which has dP and dK.
#pragma once

#include <cstdint>

#include "cuda/sm90/backward/products.h"
#include "cuda/sm90/backward/scores.h"
#include "cuda/sm90/backward/store.h"
#include "cuda/sm90/backward/weigh.h"

namespace dspattn::cuda::sm90::backward {

template <typename C>
struct KeyWarpgroup {
  const BackwardParams& params;
  Shared<C>& shared;
  int number = 0;       // of query tiles so far; stages and parities follow from it, which saves registers
  int item_number = 0;  // of this CTA's items
  int index = uniform(static_cast<int>(threadIdx.x) / 128 - 1);  // of the key warpgroup
  int part = C::kSplit == Split::keys ? index : 0;               // of the key tile
  // Found once: reading the special register again waits behind the products that are issued.
  std::uint32_t own_thread = ptx::held(threadIdx.x & 127);

  __device__ __forceinline__ int thread() const { return ptx::opaque(static_cast<int>(own_thread)); }
  __device__ __forceinline__ bool leads_warp() const { return (thread() & 31) == 0; }
  __device__ __forceinline__ static int stage_of(int tile) {
    return static_cast<int>(static_cast<unsigned>(tile) % C::kStages);
  }
  __device__ __forceinline__ int stage() const { return stage_of(number); }
  __device__ __forceinline__ static void await(const std::uint64_t& barrier, int parity) {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
  }
  // `loaded_zero` is 0, and known only when what was loaded before has arrived: see mbarrier_arrive_if().
  __device__ __forceinline__ void arrive(const std::uint64_t& barrier, std::uint32_t loaded_zero = 0) const {
    __syncwarp();  // what the other lanes have read or written, too
    ptx::mbarrier_arrive_if(ptx::shared_address(&barrier) + loaded_zero, leads_warp() ? 1u : 0u);
  }

  __device__ __forceinline__ static int parity_of(int tile) {
    return static_cast<int>(static_cast<unsigned>(tile) / C::kStages & 1);
  }
  // Query tile number `tile` is there.
  __device__ __forceinline__ void await_full(int tile) const { await(shared.full[stage_of(tile)], parity_of(tile)); }
  __device__ __forceinline__ std::uint32_t is_full(int tile) const {
    return ptx::mbarrier_test(ptx::shared_address(&shared.full[stage_of(tile)]), parity_of(tile));
  }

  __device__ __forceinline__ const Item& item() const { return shared.items[item_number % 2]; }
  __device__ __forceinline__ const std::uint8_t* k() const { return shared.k[item_number % C::kKeySlots]; }
  __device__ __forceinline__ const std::uint8_t* v() const { return shared.v[item_number % C::kValueSlots]; }

  // What of a query tile asks for slower code. Read as soon as the tile is there, long before it is needed.
  struct Marks {
    std::uint32_t words;  // bit 0: masked, bit 1: has a NaN
    std::uint32_t seen;   // the thread's word of a boolean mask

    __device__ __forceinline__ bool masked() const { return (words & 1) != 0; }
    __device__ __forceinline__ bool has_nan() const { return (words & 2) != 0; }
    __device__ __forceinline__ bool tells_masked() const { return C::kBiasAhead ? has_nan() : words == 3; }
  };
  // As they are loaded.
  struct LoadedMarks {
    std::uint32_t masked, has_nan, seen;

    // Arrivals at barriers come behind this, lest they overtake the loads (ptx/barrier.h).
    __device__ __forceinline__ Marks settled() const {
      const std::uint32_t any_masked = __all_sync(~0u, masked == 0 ? 1 : 0) != 0 ? 0 : 1;
      const std::uint32_t any_nan = __all_sync(~0u, has_nan == 0 ? 1 : 0) != 0 ? 0 : 2;
      return {any_masked | any_nan, seen};
    }
  };
  // Of a tile that is there.
  __device__ __forceinline__ LoadedMarks marks_of(int tile) const {
    const int stage = stage_of(tile), copy = thread() % kMarkCopies;
    LoadedMarks marks{static_cast<std::uint32_t>(shared.facts[stage].masked[copy]),
                      static_cast<std::uint32_t>(shared.numbers[stage].has_nan[copy]), ~0u};
    if (params.mask_words.data != nullptr) {
      // Waits for nothing, but is a loop: what has none the compiler makes instructions with a predicate, and those too
      // that are not executed wait behind the products that are issued.
      await_full(tile);
      marks.seen = params.mask_words
                       .data[std::int64_t{shared.facts[stage].mask_tile + part} * tile::kMaskWordsOfTile + thread()];
    }
    return marks;
  }
  // Whether the bias of a tile is there that is copied ahead. Asked ahead of time.
  __device__ __forceinline__ std::uint32_t is_biased(int tile) const {
    if constexpr (!C::kBiasAhead) return 1;
    const int slot = tile % C::kDScoreSlots;
    return ptx::mbarrier_test(ptx::shared_address(&shared.biased[slot]), tile / C::kDScoreSlots & 1);
  }
  // It, to registers, while the tile's scores are computed.
  __device__ __forceinline__ void read_bias_of(int tile, std::uint32_t is_there, OwnBias<C>& bias) const {
    if constexpr (C::kBiasAhead) {
      const int slot = tile % C::kDScoreSlots;
      if (is_there == 0) await(shared.biased[slot], tile / C::kDScoreSlots & 1);
      read_bias<C>(bias.words,
                   ptx::shared_address(shared.d_scores[slot]) + static_cast<std::uint32_t>(part) * kBiasBytes,
                   thread());
    }
  }
  // A 0 that asks for every load of a bias.
  __device__ __forceinline__ std::uint32_t loaded_zero(const OwnBias<C>& bias) const {
    std::uint32_t loaded = 0;
#pragma unroll
    for (int word = 0; word < C::kTileQ / 4; word += 4) loaded |= bias.words[word];
    return loaded & params.scales.opaque_zero;
  }
  // Scores of the tile in work as they are compared.
  __device__ __forceinline__ void pack(PackedTile<C>& packed, const TileScores<C>& scores, const Marks& marks,
                                       const OwnBias<C>& own_bias = {}) const {
    if constexpr (C::kBiasAhead) {
      KeyScores<C>::pack_read_bias(packed, scores, own_bias.words, params.scales.bias_scale);
      if (marks.masked()) {
        KeyScores<C>{params, item(), shared.facts[stage()], part, thread()}.hide(packed, marks.seen);
      }
    } else if (!marks.masked()) {
      pack_visible<C>(packed, scores);
    } else {
      KeyScores<C>{params, item(), shared.facts[stage()], part, thread()}.pack(packed, scores, marks.seen);
    }
    for (std::uint32_t& word : packed) ptx::pin(word);
  }
  // Whether dQ of the tile is computed whose dS has the place of this step's. Asked ahead of time.
  __device__ __forceinline__ std::uint32_t is_place_free() const {
    const int slot = number % C::kDScoreSlots;
    if (C::kBiasAhead) return 1;  // else its bias would not be there
    return ptx::mbarrier_test(ptx::shared_address(&shared.free[slot]), (number / C::kDScoreSlots & 1) ^ 1);
  }
  // dS to shared memory, when its place is free.
  __device__ __forceinline__ void store_d_scores(const TileOperand<C>& d_scores, std::uint32_t is_free) {
    const int slot = number % C::kDScoreSlots;
    if (!C::kBiasAhead && is_free == 0) await(shared.free[slot], (number / C::kDScoreSlots & 1) ^ 1);
    store_key_tile<C>(shared.d_scores[slot], part, thread(), d_scores);
  }
  // It is there for the query warpgroup. Where that can be, a step later: the fence waits until all is stored.
  __device__ __forceinline__ void announce_d_scores(int tile, bool is_stored = true) const {
    ptx::fence_async_proxy();
    __syncwarp();  // for the other lanes, too
    ptx::mbarrier_arrive_if(ptx::shared_address(&shared.stored[static_cast<unsigned>(tile) % C::kDScoreSlots]),
                            leads_warp() && is_stored ? 1u : 0u);
  }
  // dK of query tile `tile`, whose Q is in stage `stage` and whose dS is where it was stored. The first product of an
  // item does not add: what dK holds before is nothing.
  __device__ __forceinline__ void issue_d_k(Gradient<C>& d_k, int tile, int stage, bool adds) {
    issue_gradient<C>(d_k, shared.d_scores[static_cast<unsigned>(tile) % C::kDScoreSlots], part, shared.q[stage], adds);
  }
  // Before that: what all four warps have stored is there for the tensor core.
  __device__ __forceinline__ void sync_d_scores() const {
    ptx::named_barrier_sync(barrier_number(NamedBarrier::keys) + index, 128);
  }

  __device__ __forceinline__ void store_gradients(const Gradient<C>& d_k, const Gradient<C>& d_v) const {
    const KeyRows<C> rows(params, item(), part, thread());
    store_key_rows<C>(params.d_v, params.vector_d_v, rows, d_v, 1.0f, thread() & 3);
    store_key_rows<C>(params.d_k, params.vector_d_k, rows, d_k, params.d_k_scale, thread() & 3);
  }

  // After the last step: its gradients, which wait for a step that does not come, and what the keys have got.
  __device__ __forceinline__ void finish_keys(int steps, const TileOperand<C>& weights, Gradient<C>& d_k,
                                              Gradient<C>& d_v, std::uint32_t loaded_zero = 0) {
    arrive(shared.keys_free[item_number % 2], loaded_zero);
    if (steps > 0) {
      announce_d_scores(number - 1);
      const int last = stage_of(number - 1);
      sync_d_scores();
      ptx::wgmma_fence();
      issue_gradient<C>(d_v, weights, shared.d_out[last]);
      issue_d_k(d_k, number - 1, last, steps > 1);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      arrive(shared.empty[last]);
    }
    store_gradients(d_k, d_v);
  }

  // dK of the step before, whose dS is announced and, when all four warps have stored theirs, there. Behind other
  // products: the fence and the meeting take as long as those do.
  __device__ __forceinline__ void issue_d_k_before(Gradient<C>& d_k, int i, int before) {
    announce_d_scores(number - 1, i > 0);
    sync_d_scores();
    issue_d_k(d_k, number + C::kDScoreSlots - 1, before, i > 1);
  }

  // Everything of 64 keys. A step's scores are computed behind dV of the step before, its dP before that step's dK: the
  // second two while the scores are pruned. In the first step weights and dS of the step before are zeros, and its own
  // tile, which is finite, stands for the one before.
  __device__ __forceinline__ void run_keys(int steps) {
    Gradient<C> d_k = {}, d_v = {};
    TileOperand<C> weights = {};
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const int before = stage_of(i > 0 ? number - 1 : number);
      TileScores<C> scores;
      await_full(number);
      ptx::wgmma_fence();
      issue_gradient<C>(d_v, weights, shared.d_out[before]);
      issue_scores<C>(scores, k(), part, shared.q[stage()]);
      ptx::wgmma_commit();
      const LoadedMarks loaded_marks = marks_of(number);
      OwnBias<C> bias;
      read_bias_of(number, is_biased(number), bias);
      ptx::wgmma_wait<0>();
      const Marks marks = loaded_marks.settled();
      pack(weights, scores, marks, bias);
      TileScores<C> d_weights;  // in the registers of the scores, which are packed
      load_minus_d<C>(shared.numbers[stage()].minus_d, thread(), d_weights);
      const Halves<C> halves(weights, thread());
      ptx::wgmma_fence();
      issue_scores<C, true>(d_weights, v(), part, shared.d_out[stage()]);
      ptx::wgmma_commit();
      issue_d_k_before(d_k, i, before);
      ptx::wgmma_commit();
      prune_ahead<C>(weights, halves, marks.has_nan(), marks.tells_masked());
      const RowLses<C> lses(shared.numbers[stage()].lse, thread());
      ptx::wgmma_wait<1>();
      TileOperand<C> d_scores;
      prune_and_weigh<C>(params, halves, lses, marks.has_nan(), weights, d_weights, d_scores);
      ptx::wgmma_wait<0>();
      const std::uint32_t is_free = is_place_free();
      if (i > 0) arrive(shared.empty[before]);
      if (i + 1 == steps) arrive(shared.values_free[item_number % 2]);
      store_d_scores(d_scores, is_free);
      ++number;
    }
    if (steps == 0) arrive(shared.values_free[item_number % 2]);
    finish_keys(steps, weights, d_k, d_v);
  }

  // The same where registers suffice to compute the scores of the next step and the gradients of the one before while
  // this step's elements are worked on (kScoresAhead).
  __device__ __forceinline__ void run_keys_ahead(int steps) {
    Gradient<C> d_k = {}, d_v = {};
    TileOperand<C> weights = {};
    TileScores<C> scores;
    Marks marks = {};
    OwnBias<C> bias = {};
    if (steps > 0) {
      await_full(number);
      marks = marks_of(number).settled();
      ptx::wgmma_fence();
      issue_scores<C>(scores, k(), part, shared.q[stage()]);
      ptx::wgmma_commit();
      read_bias_of(number, is_biased(number), bias);
    }
    ptx::wgmma_wait<0>();
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const int before = stage_of(i > 0 ? number - 1 : number);
      // The last step computes its own scores once more, for nobody: a branch would keep the old ones in registers.
      const int next = i + 1 < steps ? number + 1 : number;
      PackedTile<C> packed;
      pack(packed, scores, marks, bias);
      const std::uint32_t next_is_full = is_full(next);
      TileScores<C> d_weights;
      load_minus_d<C>(shared.numbers[stage()].minus_d, thread(), d_weights);
      const Halves<C> halves(packed, thread());
      if (next_is_full == 0) await_full(next);
      ptx::wgmma_fence();
      issue_scores<C, true>(d_weights, v(), part, shared.d_out[stage()]);
      issue_gradient<C>(d_v, weights, shared.d_out[before]);
      issue_d_k_before(d_k, i, before);
      ptx::wgmma_commit();
      issue_scores<C>(scores, k(), part, shared.q[stage_of(next)]);
      ptx::wgmma_commit();
      // What is loaded behind products comes late: none of it is needed before these are done.
      const LoadedMarks next_marks = marks_of(next);
      prune_ahead<C>(packed, halves, marks.has_nan(), marks.tells_masked());
      const RowLses<C> lses(shared.numbers[stage()].lse, thread());
      ptx::wgmma_wait<1>();
      TileOperand<C> d_scores;
      prune_and_weigh<C>(params, halves, lses, marks.has_nan(), packed, d_weights, d_scores);
      const std::uint32_t is_free = is_place_free(), next_is_biased = is_biased(next);
      marks = next_marks.settled();
      if (i > 0) arrive(shared.empty[before]);
#pragma unroll
      for (int word = 0; word < C::kTileQ / 4; ++word) weights[word] = packed[word];
      store_d_scores(d_scores, is_free);
      read_bias_of(next, next_is_biased, bias);  // in the last step what has replaced its own, for nobody
      ++number;
      ptx::wgmma_wait<0>();
    }
    if constexpr (C::kBiasAhead) {
      finish_keys(steps, weights, d_k, d_v, loaded_zero(bias));
    } else {
      finish_keys(steps, weights, d_k, d_v);
    }
  }

  // Split::products, scores and dV.
  __device__ __forceinline__ void run_scores(int steps) {
    Gradient<C> d_v = {};
    TileOperand<C> weights = {};
    const auto issue_gradients = [&] {
      ptx::wgmma_fence();
      issue_gradient<C>(d_v, weights, shared.d_out[stage_of(number - 1)]);
      ptx::wgmma_commit();
    };
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      TileScores<C> scores;
      await_full(number);
      if (i > 0) issue_gradients();
      ptx::wgmma_fence();
      issue_scores<C>(scores, k(), 0, shared.q[stage()]);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      if (i > 0) arrive(shared.empty[stage_of(number - 1)]);
      const Marks marks = marks_of(number).settled();
      pack(weights, scores, marks);
      prune<C>(weights, Halves<C>(weights, thread()), marks.tells_masked());
      const int slot = number % 2;
      await(shared.handed.empty[slot], (number / 2 & 1) ^ 1);
      hand_over<C>(shared.handed.words[slot], thread(), weights);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.handed.full[slot]));
      const RowLses<C> lses(shared.numbers[stage()].lse, thread());
      weigh<C>(params, lses, marks.has_nan(), weights);
      ++number;
    }
    arrive(shared.keys_free[item_number % 2]);
    if (steps > 0) {
      issue_gradients();
      ptx::wgmma_wait<0>();
      arrive(shared.empty[stage_of(number - 1)]);
    }
    const KeyRows<C> rows(params, item(), 0, thread());
    store_key_rows<C>(params.d_v, params.vector_d_v, rows, d_v, 1.0f, thread() & 3);
  }

  // Split::products, dP, dS and dK.
  __device__ __forceinline__ void run_d_scores(int steps) {
    Gradient<C> d_k = {};
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      TileScores<C> d_weights;
      await_full(number);
      load_minus_d<C>(shared.numbers[stage()].minus_d, thread(), d_weights);
      ptx::wgmma_fence();
      issue_scores<C, true>(d_weights, v(), 0, shared.d_out[stage()]);
      ptx::wgmma_commit();
      TileOperand<C> weights, d_scores;
      const int slot = number % 2;
      const bool has_nan = shared.numbers[stage()].has_nan[thread() % kMarkCopies] != 0;
      const std::uint32_t is_free = is_place_free();
      const RowLses<C> lses(shared.numbers[stage()].lse, thread());
      await(shared.handed.full[slot], number / 2 & 1);
      take_over<C>(shared.handed.words[slot], thread(), weights);
      ptx::wgmma_wait<0>();
      weigh<C>(params, lses, has_nan, weights, d_weights, d_scores);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.handed.empty[slot]));
      if (i + 1 == steps) arrive(shared.values_free[item_number % 2]);
      store_d_scores(d_scores, is_free);
      announce_d_scores(number);
      sync_d_scores();
      ptx::wgmma_fence();
      issue_d_k(d_k, number, stage(), true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      arrive(shared.empty[stage()]);
      ++number;
    }
    if (steps == 0) arrive(shared.values_free[item_number % 2]);
    arrive(shared.keys_free[item_number % 2]);
    const KeyRows<C> rows(params, item(), 0, thread());
    store_key_rows<C>(params.d_k, params.vector_d_k, rows, d_k, params.d_k_scale, thread() & 3);
  }

  // All of this CTA's items.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; ++item_number) {
      await(shared.described[item_number % 2], item_number / 2 & 1);
      if (uniform(item().valid) == 0) return;
      const int steps = uniform(steps_of(params, item()));
      if constexpr (C::kScoresAhead) {
        run_keys_ahead(steps);
      } else if constexpr (C::kSplit == Split::keys) {
        run_keys(steps);
      } else if (index == 0) {
        run_scores(steps);
      } else {
        run_d_scores(steps);
      }
      arrive(shared.left[item_number % 2]);
    }
  }
};

}  // namespace dspattn::cuda::sm90::backward
