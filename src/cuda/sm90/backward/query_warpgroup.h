// The query warpgroup of the fused backward: it copies an item's K and V, streams the query tiles, and computes dQ.
//
//   dQ / scale += dS K
//
// dS of a tile comes from the key warpgroups, through shared memory. Of the sum in the workspace every CTA that meets
// the query tile adds a share; whose turn it is a counter says (tile/gradient_walk.h).
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/ordered_sums.h"
#include "cuda/ptx/proxies.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_stored_shapes.h"
#include "cuda/sm90/backward/keys.h"
#include "cuda/sm90/backward/shared.h"
#include "cuda/tile/key_row_masks.h"

namespace dspattn::cuda::sm90::backward {

template <typename C>
struct QueryWarpgroup {
  const BackwardParams& params;
  Shared<C>& shared;
  int warp =
      uniform(static_cast<int>(threadIdx.x) / 32);  // found once: behind products a shuffle takes hundreds of clocks
  int item_number = 0;                              // of this CTA's items, the one whose dQ is computed
  int number = 0;                                   // of query tiles whose dQ is computed

  // Query tiles are asked for ahead of time, those of the next item too: by warp 0. So are biases, by warps of their
  // own: what follows is each of these warps' own, the ring warp 0's.
  Ring<C::kStages> loads = {};
  int loaded = 0;                    // tiles
  int load_number = 0;               // of the item
  int load_left = -1;                // steps of it that are not asked for yet; -1: none of it
  Step load_step = {};               // the next
  int taken = 0;                     // items
  int drawn = 0;                     // number of the next item, of thread 0
  std::int32_t ctas_done = 0;        // of prepare_rows, when it was drawn
  std::int32_t* to_count = nullptr;  // where a share is added, but not counted yet

  using SumPart = float[C::kSumColumns / 2];  // of a thread: of 64 rows

  // Found once: reading the special register again waits behind the products that are issued.
  std::uint32_t own_thread = ptx::held(threadIdx.x);

  __device__ __forceinline__ int thread() const { return ptx::opaque(static_cast<int>(own_thread)); }
  __device__ __forceinline__ bool leads_warp() const { return thread() % 32 == 0; }

  __device__ __forceinline__ Item& item(int which) const { return shared.items[which % 2]; }
  __device__ __forceinline__ static void await(const std::uint64_t (&barriers)[2], int which) {
    ptx::mbarrier_wait(ptx::shared_address(&barriers[which % 2]), which / 2 & 1);
  }
  __device__ __forceinline__ void arrive(const std::uint64_t (&barriers)[2], int which) const {
    __syncwarp();  // what the other lanes have read or written, too
    if (leads_warp()) ptx::mbarrier_arrive(ptx::shared_address(&barriers[which % 2]));
  }

  // The number of the CTA's next item is asked for ahead of time.
  __device__ __forceinline__ void draw_next() {
    if (thread() != 0) return;
    drawn = atomicAdd(params.scratch.taken + params.launch, 1);
    ctas_done = ptx::count_now(params.scratch.prepared);
  }
  // The CTA's next item, when there is room for its description.
  __device__ __forceinline__ void take_next() {
    if (taken > 1) await(shared.left, taken - 2);
    if (thread() == 0) take_item<C>(params, drawn, ctas_done, item(taken), shared.all_prepared);
    ptx::named_barrier_sync(barrier_number(NamedBarrier::queries), 128);  // it is described for these threads
    ++taken;
  }
  // Its K, or V, is asked for, when nobody needs what has its place; and is there.
  __device__ __forceinline__ void copy_next_keys() {
    const int which = taken - 1;
    if (item(which).valid == 0) return;
    if (which >= C::kKeySlots) await(shared.keys_free, which - C::kKeySlots);
    copy_keys<C>(params, item(which), shared.k[which % C::kKeySlots], params.k, params.d, params.vector_k);
  }
  __device__ __forceinline__ void copy_next_values() {
    const int which = taken - 1;
    if (item(which).valid == 0) return;
    if (which >= C::kValueSlots) {
      await(C::kValueSlots == 1 ? shared.values_free : shared.keys_free, which - C::kValueSlots);
    }
    copy_keys<C>(params, item(which), shared.v[which % C::kValueSlots], params.v, params.value_d, params.vector_v);
  }
  __device__ __forceinline__ void complete_next_keys() {
    const int which = taken - 1;
    if (item(which).valid != 0) complete_keys<C, tile::Infinity::largest>(shared.k[which % C::kKeySlots]);
  }
  __device__ __forceinline__ void complete_next_values() {
    const int which = taken - 1;
    if (item(which).valid != 0) complete_keys<C, tile::Infinity::zero>(shared.v[which % C::kValueSlots]);
  }

  // Asks for the query tile of a step; its stage is free. By a whole warp, of which one lane does: requests of a thread
  // in a branch of its own take three times as many instructions.
  __device__ __forceinline__ void load_tile(const Item& described) {
    const Item item = described;  // at once: loads one by one wait one by one
    const std::int64_t tile = load_step.scratch_tile(params, item);
    const std::uint32_t full = loads.barrier(shared.full);
    if (ptx::elect()) {
      shared.facts[loads.stage] = facts_of<C>(params, item, load_step);
      constexpr int kNumberBytes = static_cast<int>(sizeof(shared.numbers[0]));
      ptx::mbarrier_arrive_expect(full, 2 * C::kTileQBytes + kNumberBytes);
      ptx::bulk_load(ptx::shared_address(shared.q[loads.stage]), params.scratch.q + tile * C::kTileQBytes,
                     C::kTileQBytes, full);
      ptx::bulk_load(ptx::shared_address(shared.d_out[loads.stage]), params.scratch.d_out + tile * C::kTileQBytes,
                     C::kTileQBytes, full);
      ptx::bulk_load(ptx::shared_address(&shared.numbers[loads.stage]), params.scratch.numbers + tile * kNumberBytes,
                     kNumberBytes, full);
    }
    __syncwarp();
    load_step.advance(item);
    loads.advance();
    --load_left;
    ++loaded;
  }
  // Whether there is a tile to ask for, of an item that is taken.
  __device__ __forceinline__ bool finds_next() {
    while (load_left <= 0) {
      const int next = load_left < 0 ? load_number : load_number + 1;
      if (next == taken || item(next).valid == 0) return false;
      load_number = next;
      load_left = steps_of(params, item(next));
      load_step = Step::first(params, item(next));
      if (item(next).fresh != 0) ptx::fence_async_proxy_global();
    }
    return true;
  }
  // By warp 0. Those tiles that the key warpgroups need to get to the end of the step in work; it waits for their
  // stages.
  __device__ __forceinline__ void load_needed() {
    if (warp != kLoadingWarp) return;
#pragma unroll 1
    while (loaded < number + kLoadsNeeded && finds_next()) {
      loads.await_empty(shared.empty);
      load_tile(item(load_number));
    }
  }
  // Those whose stages are free.
  __device__ __forceinline__ void load_free() {
    if (warp != kLoadingWarp) return;
#pragma unroll 1
    while (finds_next() && is_done(loads.barrier(shared.empty), loads.parity ^ 1)) load_tile(item(load_number));
  }
  // The bias of the next step, by the warp that copies those of a part of the key tile; absent rows and keys are zeros.
  __device__ __forceinline__ void copy_bias(const Item& described) {
    const Item item = described;
    const int part = warp - kBiasWarp;
    const tile::BiasRun run = tile::BiasRun::of(thread() % 32);
    const MaskTensor& bias = params.bias;
    const int first = load_step.tile * C::kTileQ + run.query;
    const int key = item.block * tile::kBlockKeys + run.key(params.keys, item.part * C::kParts + part);
    const auto* from = static_cast<const std::uint16_t*>(bias.data) + item.sequence * bias.batch_stride +
                       load_step.head * bias.head_stride + first * bias.row_stride + key;
    const int slot = loaded % C::kDScoreSlots;
    const std::uint32_t to = ptx::shared_address(shared.d_scores[slot]) + static_cast<std::uint32_t>(part) * kBiasBytes;
    const std::int64_t step = tile::kBiasRunQueries * bias.row_stride;
    if (item.rows >= (load_step.tile + 1) * C::kTileQ && item.keys >= (item.block + 1) * tile::kBlockKeys) {
      // All of it is there: three instructions a copy. Where the later queries of eight lie is an exclusive or.
      constexpr int kQueries = 4 * tile::kBiasRunQueries;
      std::uint32_t places[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        constexpr tile::BiasRun kFirst = tile::BiasRun::of(0);
        places[i] = (to + static_cast<std::uint32_t>(run.offset(run.query))) ^
                    static_cast<std::uint32_t>(kFirst.offset(tile::kBiasRunQueries * i));
      }
#pragma unroll
      for (int i = 0; i < C::kTileQ / tile::kBiasRunQueries; ++i) {
        ptx::copy_async_8(places[i % 4] + static_cast<std::uint32_t>(i / 4 * kQueries * 32), from);
        from += step;
      }
    } else {
      const int rows = item.rows - first, bytes = min(2 * max(item.keys - key, 0), 8);
#pragma unroll 1
      for (int query = 0; query < C::kTileQ; query += tile::kBiasRunQueries) {
        ptx::copy_async_8(to + static_cast<std::uint32_t>(run.offset(run.query + query)), from,
                          query < rows ? bytes : 0);
        from += step;
      }
    }
    ptx::copy_async_arrive(ptx::shared_address(&shared.biased[slot]));
    load_step.advance(item);
    --load_left;
    ++loaded;
  }
  // Those of all tiles before tile `end` whose item is taken.
  __device__ __forceinline__ void copy_biases(int end) {
    if constexpr (C::kBiasAhead) {
      if (warp < kBiasWarp) return;
#pragma unroll 1
      while (loaded < end && finds_next()) copy_bias(item(load_number));
    }
  }
  // Whether a phase is over; the same in all lanes.
  __device__ __forceinline__ static bool is_done(std::uint32_t barrier, int parity) {
    return uniform(static_cast<int>(ptx::mbarrier_test(barrier, parity))) != 0;
  }

  // 64 x 64 of dS K over the key tile: rows of panel `rows` of the queries, columns of panel `columns` of K.
  __device__ __forceinline__ void issue_d_q(SumPart& d, int rows, int columns) {
    const auto at = [](const std::uint8_t* tile, int panel, int column) {
      return ptx::descriptor_low(
          ptx::shared_address(tile) + static_cast<std::uint32_t>(panel * C::kPanelKBytes + 2 * column),
          C::kPanelKBytes);
    };
    const std::uint32_t a = at(shared.d_scores[number % C::kDScoreSlots], rows, 0);
    const std::uint32_t b = at(shared.k[item_number % C::kKeySlots], columns / 64, columns % 64);
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step) {
      constexpr std::uint32_t kDepthStep = 16 * 128 >> 4;  // 16 rows of either operand
      if (step == 0) {
        ptx::wgmma_stored_first<C::kType, 1, 1>(d, ptx::descriptor(a), ptx::descriptor(b));
      } else {
        ptx::wgmma_stored<C::kType, 1, 1>(d, ptx::descriptor(a + step * kDepthStep),
                                          ptx::descriptor(b + step * kDepthStep));
      }
    }
  }

  // The first share of a sum is stored, the others are added.
  __device__ __forceinline__ static void add_share(float* to, const SumPart& d, bool first) {
    if (first) {
#pragma unroll
      for (int i = 0; i < C::kSumColumns / 2; i += 4) {
        ptx::store_global_16(to + 128 * i, __float_as_uint(d[i]), __float_as_uint(d[i + 1]), __float_as_uint(d[i + 2]),
                             __float_as_uint(d[i + 3]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < C::kSumColumns / 2; i += 4) {
        ptx::add_global_16(to + 128 * i, d[i], d[i + 1], d[i + 2], d[i + 3]);
      }
    }
  }

  // Where a step's share goes, and when.
  struct Share {
    std::int32_t* count;
    float* to;   // of this thread
    int before;  // shares that must have been added
  };
  __device__ __forceinline__ Share share_of(const Item& item, const Step& step) const {
    const tile::Turn turn = turn_of<C>(params, item, step);
    const std::int64_t tile = static_cast<std::int64_t>(turn.sum) * params.query_tiles * params.work.heads.value +
                              step.scratch_tile(params, item);
    return {params.scratch.counts + tile, params.scratch.sums + tile * (C::kTileQ * C::kHeadDim) + 4 * thread(),
            turn.before};
  }

  // This CTA's share of a step's dQ. Every warp waits for its turn and adds its rows; when all have, one counts that.
  __device__ __forceinline__ void run_step(const Item& item, const Step& step) {
    const Share share = share_of(item, step);
    std::int32_t counted = 0;
    if (leads_warp()) counted = ptx::count_now(share.count);  // ahead of time
    const int slot = number % C::kDScoreSlots;
    const std::uint32_t stored = ptx::shared_address(&shared.stored[slot]);
    const int parity = number / C::kDScoreSlots & 1;
    // The last share is counted and tiles are asked for while dS is waited for, or else beside the first product.
    if (!is_done(stored, parity)) {
      count_last();
      load_free();
      ptx::mbarrier_wait(stored, parity);
    }
#pragma unroll 1
    for (int pass = 0; pass < C::kSumPasses; ++pass) {
      SumPart d;
      ptx::wgmma_fence();
      const int column = pass * C::kSumColumns;  // as if all rows lay side by side
      issue_d_q(d, column / C::kHeadDim, column % C::kHeadDim);
      ptx::wgmma_commit();
      if (pass == 0) {
        count_last();
        load_free();
        if constexpr (C::kBiasAhead) copy_biases(number + 1 + C::kTilesOfBiasAhead);
        if (leads_warp() && counted < share.before) ptx::await_count(share.count, share.before);
        __syncwarp();
      }
      ptx::wgmma_wait<0>();
      if constexpr (!C::kBiasAhead) {
        if (pass == C::kSumPasses - 1 && leads_warp()) ptx::mbarrier_arrive(ptx::shared_address(&shared.free[slot]));
      }
      add_share(share.to + pass * 64 * C::kSumColumns, d, share.before == 0);
    }
    ptx::named_barrier_sync(barrier_number(NamedBarrier::queries), 128);  // all additions come before the count
    to_count = share.count;
    if (!C::kCountsLater) count_last();
    ++number;
  }
  // The additions of the last share, all of the warpgroup's. By a warp that does not load: either takes its time.
  __device__ __forceinline__ void count_last() {
    if (thread() == 32 * kCountingWarp && to_count != nullptr) ptx::count_up(to_count);
    to_count = nullptr;
  }

  // The next item is taken as late as its K and V may come in time: those who take others meanwhile may wait for its
  // shares. Where there is room for two, its K, or V, is there before the last step of this one; else it is asked for
  // as soon as there is: V's place is free in the middle of that step.
  __device__ __forceinline__ void run_item() {
    constexpr bool kEarlyKeys = C::kKeySlots > 1, kEarlyValues = C::kValueSlots > 1;
    // In registers: every step asks for what the item is, and behind products a load takes hundreds of clocks.
    const Item own = item(item_number);
    const int steps = uniform(steps_of(params, own));
    Step step = Step::first(params, own);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      if (i == max(steps - kStepsAhead - 1, 0)) draw_next();
      if (i == max(steps - kStepsAhead, 0)) {
        take_next();
        if (kEarlyKeys) copy_next_keys();
        if (kEarlyValues) copy_next_values();
      }
      load_needed();
      if (i == max(steps - kStepsAhead + 1, min(steps - 1, 1))) {
        if (kEarlyKeys) complete_next_keys();
        if (kEarlyValues) complete_next_values();
        if (kEarlyKeys && kEarlyValues) arrive(shared.described, taken - 1);
      }
      if (i == steps - 1 && !kEarlyValues) {
        copy_next_values();
        if (kEarlyKeys) {  // the key warpgroups are done with this item before its last share may be added
          complete_next_values();
          arrive(shared.described, taken - 1);
        }
      }
      run_step(own, step);
      step.advance(own);
    }
    count_last();
    arrive(shared.keys_free, item_number);
    if (steps == 0) {
      draw_next();
      take_next();
    }
    if (steps == 0 || !kEarlyKeys) copy_next_keys();
    if (steps == 0) copy_next_values();
    if (steps > 0 && kEarlyKeys) return;
    load_free();
    if constexpr (C::kBiasAhead) copy_biases(number + C::kTilesOfBiasAhead);
    complete_next_keys();
    complete_next_values();
    arrive(shared.described, taken - 1);
  }

  // All of this CTA's items.
  __device__ __forceinline__ void run() {
    if (thread() == 0) shared.all_prepared = 0;
    draw_next();
    take_next();
    load_free();
    if constexpr (C::kBiasAhead) copy_biases(C::kTilesOfBiasAhead);
    copy_next_keys();
    copy_next_values();
    complete_next_keys();
    complete_next_values();
    arrive(shared.described, 0);
#pragma unroll 1
    for (; uniform(item(item_number).valid) != 0; ++item_number) run_item();
    ptx::wait_for_kernels_before();  // this kernel does not end before prepare_rows
  }

  static constexpr int kLoadingWarp = 0, kCountingWarp = 1, kBiasWarp = 2;
  // Tiles: the one in work; the next, where its scores come before this one's dS or it would come too late.
  static constexpr int kLoadsNeeded = C::kScoresAhead || C::kStages == 2 ? 2 : 1;
  static constexpr int kStepsAhead = 3;
};

}  // namespace dspattn::cuda::sm90::backward
