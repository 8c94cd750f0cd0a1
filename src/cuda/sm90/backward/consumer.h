// A consumer warpgroup of the fused backward: its part of every query tile against the CTA's key tile.
//
//   S = Q K^T, pruned     P = exp(S - LSE)     dP = dO V^T     dS = P (dP - D)
//   dQ += dS K            dV += P^T dO         dK += dS^T Q
//
// dK and dV stay in registers for the whole walk over query tiles. P and dS go to shared memory once, zeros where
// pruned, for the products that contract over queries and for dQ.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/ordered_sums.h"
#include "cuda/sm90/backward/products.h"
#include "cuda/sm90/backward/scores.h"
#include "cuda/sm90/backward/store.h"

namespace dspattn::cuda::sm90::backward {

template <typename C>
struct Consumer {
  const BackwardParams& params;
  Shared<C>& shared;
  Products<C> products;
  int index;       // of this warpgroup
  int number = 0;  // of this CTA's query tiles so far; stages and parities follow from it, which saves registers

  __device__ __forceinline__ Consumer(const BackwardParams& p, Shared<C>& s, int warpgroup)
      : params(p), shared(s), products(s, warpgroup), index(warpgroup) {}

  __device__ __forceinline__ static int thread() { return ptx::opaque(static_cast<int>(threadIdx.x)) & 127; }
  __device__ __forceinline__ static int lane() { return thread() & 31; }
  __device__ __forceinline__ Ring<C::kStages> ring() const { return {number % C::kStages, number / C::kStages & 1}; }
  // The first of the warp's 16 rows in the query tile.
  __device__ __forceinline__ int warp_row() const {
    return (C::kSplit == Split::queries ? index * 64 : 0) + (thread() >> 5) * 16;
  }
  __device__ __forceinline__ void sync(NamedBarrier barrier) const {
    ptx::named_barrier_sync(barrier_number(barrier), 128 * C::kConsumers);
  }

  // P and dS of the tile to shared memory. A lane's group block m has two elements in column block m and two in column
  // block kTileK / 16 + m; two neighbouring column blocks of 16 rows are stored at once. kNan: a row is NaN,
  // and so is what it gives to every key that it sees, and to no other.
  template <bool kNan>
  __device__ __forceinline__ void store_weights(const PackedWords<C>& packed, const Scores<C>& d_weights,
                                                const RowNumbers& own, const RowNumbers& other) {
    const float scale = params.scales.exp2_scale;
    const std::uint32_t at = static_cast<std::uint32_t>(warp_row() + (lane() & 15)) * 128;
    const std::uint32_t chunk = static_cast<std::uint32_t>((lane() >> 4) ^ (lane() & 7)) << 4;
    const std::uint32_t weights = ptx::shared_address(shared.weights) + at;
    const std::uint32_t d_scores = ptx::shared_address(shared.d_scores) + at;
    const int first_block = C::kSplit == Split::keys ? index * (C::kTileK / 8) : 0;
    constexpr int kGroupBlocks = C::kTileK / 16;
#pragma unroll
    for (int i = 0; i < kGroupBlocks; ++i) {
      const int m = i / 2 * 2;  // of a pair of group blocks, once the first and once the second half of the groups
      const int half = i % 2;
      std::uint32_t p[4], ds[4];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float x[4];  // rows g and g + 8 of either element
        ptx::unpack_f16x2(packed.words[4 * (m + b) + 2 * half], x[0], x[2]);
        ptx::unpack_f16x2(packed.words[4 * (m + b) + 2 * half + 1], x[1], x[3]);
        const float* dp = d_weights + score_index<C>(m + b, 2 * half);
        float y[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const bool masked = kNan && x[k] == kLowestScore;
          x[k] = masked ? 0.0f : ptx::exp2_fast(fmaf(x[k], scale, k < 2 ? -own.lse : -other.lse));
          y[k] = masked ? 0.0f : x[k] * (dp[k] - (k < 2 ? own.d : other.d));
        }
        p[2 * b] = pack(x[0], x[1]);
        p[2 * b + 1] = pack(x[2], x[3]);
        ds[2 * b] = pack(y[0], y[1]);
        ds[2 * b + 1] = pack(y[2], y[3]);
      }
      const int block = first_block + half * kGroupBlocks + m;
      const std::uint32_t to = static_cast<std::uint32_t>(block / 8) * C::kPanelQBytes +
                               (chunk ^ static_cast<std::uint32_t>(block % 8) << 4);
      ptx::store_matrices(weights + to, p[0], p[1], p[2], p[3]);
      ptx::store_matrices(d_scores + to, ds[0], ds[1], ds[2], ds[3]);
    }
  }
  __device__ __forceinline__ static std::uint32_t pack(float low, float high) {
    return C::kType == DType::bf16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
  }

  // Adds the warpgroup's share of the tile's dQ, when those before it are in; the first is stored.
  __device__ __forceinline__ void add_share(const Step& step, const float (&d_q)[C::kSumColumns / 2]) {
    const tile::Turn turn = turn_of<C>(params, shared.item, step);
    const std::int64_t tile =
        static_cast<std::int64_t>(turn.sum) * params.query_tiles * params.work.heads.value + step.scratch_tile;
    constexpr int kShare = C::kTileQ * C::kHeadDim / C::kConsumers;
    float* to = params.scratch.sums + (tile * C::kConsumers + index) * kShare + 4 * thread();
    ptx::mbarrier_wait(ptx::shared_address(&shared.may_add[index]), number & 1);
    if (turn.before == 0) {
#pragma unroll
      for (int i = 0; i < C::kSumColumns / 8; ++i) {
        ptx::store_global_16(to + 4 * 128 * i, __float_as_uint(d_q[4 * i]), __float_as_uint(d_q[4 * i + 1]),
                             __float_as_uint(d_q[4 * i + 2]), __float_as_uint(d_q[4 * i + 3]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < C::kSumColumns / 8; ++i) {
        ptx::add_global_16(to + 4 * 128 * i, d_q[4 * i], d_q[4 * i + 1], d_q[4 * i + 2], d_q[4 * i + 3]);
      }
    }
    ptx::named_barrier_arrive(barrier_number(NamedBarrier::shares_added, index), 128 + 32);
  }

  __device__ __forceinline__ void run_step(const Step& step) {
    const Item& item = shared.item;
    Scores<C> scores, d_weights;
    ring().await_full(shared.full);
    ptx::wgmma_fence();
    products.issue_scores(scores, shared.q[ring().stage], shared.k);
    ptx::wgmma_commit();
    products.issue_scores(d_weights, shared.d_out[ring().stage], shared.v);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    PackedWords<C> packed;
    const int first = step.tile * C::kTileQ;
    constexpr int kParts = C::kKeys / C::kTileK;
    const int part = item.part * kParts + (C::kSplit == Split::keys ? index : 0);
    ScoreRows<C>{params, item, step.head, first + warp_row() + (lane() >> 2), part, lane() & 3}.prune(packed, scores,
                                                                                                      first);
    ptx::wgmma_wait<0>();
    sync(NamedBarrier::weights_free);
    const int row = warp_row() + (lane() >> 2);
    const RowNumbers own = shared.rows[ring().stage][row];
    const RowNumbers other = shared.rows[ring().stage][row + 8];
    if (__all_sync(~0u, own.lse == own.lse && other.lse == other.lse) != 0) {
      store_weights<false>(packed, d_weights, own, other);
    } else {
      store_weights<true>(packed, d_weights, own, other);
    }
    ptx::fence_async_proxy();
    sync(NamedBarrier::weights_stored);
    float d_q[C::kSumColumns / 2];
    ptx::wgmma_fence();
    products.issue_d_q(d_q);
    ptx::wgmma_commit();
    products.issue_gradient(products.d_v, shared.weights, shared.d_out[ring().stage]);
    products.issue_gradient(products.d_k, shared.d_scores, shared.q[ring().stage]);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    add_share(step, d_q);
    ptx::wgmma_wait<0>();
    ring().release(shared.empty, lane() == 0 ? 1u : 0u);
    ++number;
  }

  __device__ __forceinline__ void store_gradients() {
    const KeyRows<C> rows(params, shared.item, index, thread());
    store_key_rows<C>(params.d_v, params.vector_d_v, rows, products.d_v, 1.0f, lane() & 3);
    store_key_rows<C>(params.d_k, params.vector_d_k, rows, products.d_k, params.d_k_scale, lane() & 3);
  }

  // All of this CTA's items.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      ptx::named_barrier_sync(barrier_number(NamedBarrier::item), C::kThreads);
      if (uniform(shared.item.valid) == 0) return;
      products.clear();
      const int steps = uniform(steps_of(params, shared.item));
#pragma unroll 1
      for (int i = 0; i < steps; ++i) run_step(step_of(params, shared.item, i));
      store_gradients();
      ptx::named_barrier_sync(barrier_number(NamedBarrier::item), C::kThreads);
    }
  }
};

}  // namespace dspattn::cuda::sm90::backward
