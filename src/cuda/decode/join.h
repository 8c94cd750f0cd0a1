// After the last tile: the results of a CTA's teams are joined in its shared memory, those of a cluster's CTAs across
// theirs, and what a unit's clusters have is final or is left for the merge kernel. All sums are added in a fixed
// order.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decode/results.h"
#include "cuda/decode/team.h"
#include "cuda/ptx/cluster.h"

namespace dspattn::cuda::decode {

// Results in fp32 and stats of a CTA, and of the others of its cluster. A thread has four columns of a row.
template <typename C>
struct CtaResults {
  static constexpr int kChunks = C::kHeadDim / 4;  // of a row
  const Params& p;
  const Part& part;
  const SharedLayout& layout;
  std::uint8_t* shared;

  // Of a row by warp `warp`, which has it.
  __device__ __forceinline__ float* out(int warp_of_row, int row) const {
    return reinterpret_cast<float*>(shared + warp_of_row * layout.out_bytes) + row % kWarpRows * C::kHeadDim;
  }
  __device__ __forceinline__ const RowStats& stats(int warp_of_row, int row) const {
    return reinterpret_cast<const RowStats*>(shared + layout.stats)[warp_of_row * kWarpRows + row % kWarpRows];
  }
  // Of all teams; `purpose` 1: what heads choose by, or in the end those of the whole cluster.
  __device__ __forceinline__ RowStats* joined(int row, int purpose = 0) const {
    return reinterpret_cast<RowStats*>(shared + layout.joined) + purpose * kMaxRows + row;
  }
  // What the results of a row's parts are multiplied by: of teams, or of the cluster's CTAs.
  __device__ __forceinline__ float* factors(int row) const {
    return reinterpret_cast<float*>(shared + layout.factors) + row * kMaxCluster;
  }

  // Joins a row's parts, of which part_at(i) is part i, by one thread; leaves their factors.
  template <int kMost, typename PartAt>
  __device__ __forceinline__ RowStats join_row(int row, int count, PartAt part_at) const {
    RowStats parts[kMost];
    RowStats sum{-INFINITY, 0};
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      parts[i] = i < count ? part_at(i) : RowStats{-INFINITY, 0};
      sum.reference = fmaxf(sum.reference, parts[i].reference);
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const float factor = part_factor(parts[i], sum.reference, p.scales.exponent);
      if (parts[i].sum != 0) sum.sum += parts[i].sum * factor;
      if (parts[i].rest != 0) sum.rest += parts[i].rest * factor;
      if (i < count) factors(row)[i] = factor;
    }
    return sum;
  }
  // Over the teams.
  __device__ __forceinline__ RowStats join_stats(int row) const {
    const int first = row / kWarpRows;  // the first team's warp
    return join_row<kMaxWarps>(row, p.teams.count, [&](int i) { return stats(first + i * p.teams.warps, row); });
  }
  // Over the cluster's CTAs.
  __device__ __forceinline__ RowStats join_cluster_stats(int row, int purpose) const {
    const std::uint32_t address = ptx::shared_address(joined(row, purpose));
    return join_row<kMaxCluster>(row, p.cluster.value, [&](int cta) -> RowStats {
      const auto rank = static_cast<std::uint32_t>(cta);
      return {ptx::load_cluster(address, rank), ptx::load_cluster(address + 4, rank),
              p.keeps_rest() ? ptx::load_cluster(address + 8, rank) : 0.0f};
    });
  }

  // Calls visit(row, column) for every four columns of every row, a thread each; `workers` threads, this being
  // `worker`.
  template <typename Visit>
  __device__ __forceinline__ void each_chunk(int worker, int workers, Visit visit) const {
    for (int item = worker; item < part.rows * kChunks; item += workers) {
      visit(item / kChunks, item % kChunks * 4);
    }
  }
  __device__ __forceinline__ static void add(float4& sum, float factor, const float4& x) {
    if (factor == 0) return;  // whatever the results hold
    sum = make_float4(fmaf(factor, x.x, sum.x), fmaf(factor, x.y, sum.y), fmaf(factor, x.z, sum.z),
                      fmaf(factor, x.w, sum.w));
  }

  // Joined values of four columns, final or not.
  __device__ __forceinline__ void store(int row, int column, float4 x, const RowStats& row_stats) const {
    const int columns = p.results.out.columns;
    if (p.partials.out != nullptr) {
      const int parts = p.cluster.quotient(p.splits.value);
      const std::int64_t partial =
          (static_cast<std::int64_t>(part.unit) * parts + p.cluster.quotient(part.split)) * p.rows + row;
      store_floats(p.partials.out + partial * columns + column, x, columns - column);
      if (column == 0) p.partials.stats[partial] = row_stats;
      return;
    }
    const tile::PackedRow which = part.packed_row(p, row);
    const int head = part.kv_head * p.heads_per_kv_head + which.head;
    const float sum = row_stats.sum;
    if constexpr (C::kSumsPruned) {
      add_rest(p, part.batch, part.kv_head, tile::interval_of(part.band, which.query), row_stats, column,
               min(columns - column, 4), x);
    }
    store_results(p.results, C::kType, p.results.out.offset(part.batch, head, which.query) + column,
                  make_float4(normalised(x.x, sum), normalised(x.y, sum), normalised(x.z, sum), normalised(x.w, sum)),
                  columns - column);
    if (column == 0) {
      store_lse(p.results, p.results.lse.offset(part.batch, head, which.query), row_stats, p.scales.exponent);
    }
  }

  // Joins the teams' rows: final where the CTA is alone, else in place, where the first team's are.
  __device__ __forceinline__ void join_teams() const {
    each_chunk(static_cast<int>(threadIdx.x), 32 * p.teams.cta_warps(), [&](int row, int column) {
      const int first = row / kWarpRows;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 2
      for (int i = 0; i < p.teams.count; ++i) {
        add(sum, factors(row)[i], *reinterpret_cast<const float4*>(out(first + i * p.teams.warps, row) + column));
      }
      if (p.cluster.value == 1) {
        store(row, column, sum, *joined(row));
      } else {
        *reinterpret_cast<float4*>(out(first, row) + column) = sum;
      }
    });
  }

  // Joins what join_teams() left in the cluster's CTAs, each of which stores some of the columns.
  __device__ __forceinline__ void join_cluster() const {
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < part.rows) *joined(thread, 1) = join_cluster_stats(thread, 0);
    __syncthreads();  // stats and factors are there
    const int threads = 32 * p.teams.cta_warps();
    each_chunk(p.cluster.remainder(part.split) * threads + thread, p.cluster.value * threads, [&](int row, int column) {
      const std::uint32_t address = ptx::shared_address(out(row / kWarpRows, row) + column);
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int cta = 0; cta < p.cluster.value; ++cta) {
        add(sum, factors(row)[cta], ptx::load_cluster_16(address, static_cast<std::uint32_t>(cta)));
      }
      store(row, column, sum, *joined(row, 1));
    });
  }
};

// Where the stats of a warp's rows are left for the CTA to join.
template <typename C>
__device__ __forceinline__ RowStats* stats_of_warp(const Team<C>& team, std::uint8_t* shared) {
  return reinterpret_cast<RowStats*>(shared + team.layout.stats) + team.warp * kWarpRows;
}

// Joins the teams' results and writes them, after the stats of every warp's rows.
template <typename C>
__device__ __forceinline__ void finish(Team<C>& team, std::uint8_t* shared) {
  __syncthreads();  // everything has been read: results go over it; and stats are there
  team.products.deposit(reinterpret_cast<float*>(shared + team.warp * team.layout.out_bytes), team.rows, team.lane);
  const CtaResults<C> results{team.p, team.part, team.layout, shared};
  const auto row = static_cast<int>(threadIdx.x);
  if (row < team.part.rows) *results.joined(row) = results.join_stats(row);
  __syncthreads();  // results and factors are there
  results.join_teams();
  if (team.p.cluster.value == 1) return;
  ptx::sync_whole_cluster();  // every CTA's joined results are there
  results.join_cluster();
  ptx::sync_whole_cluster();  // and have been read: shared memory lives until then
}

}  // namespace dspattn::cuda::decode
