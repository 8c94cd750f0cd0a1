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

// Results in fp32 and stats of a CTA, and of the others of its cluster.
template <typename C>
struct CtaResults {
  const Params& p;
  const Part& part;
  const SharedLayout& layout;
  std::uint8_t* shared;
  int lane = static_cast<int>(threadIdx.x) & 31;
  int warp = static_cast<int>(threadIdx.x) >> 5;

  // Of a row by warp `warp`, which has it.
  __device__ __forceinline__ float* out(int warp_of_row, int row) const {
    return reinterpret_cast<float*>(shared + warp_of_row * layout.out_bytes) + row % kWarpRows * C::kHeadDim;
  }
  __device__ __forceinline__ const RowStats& stats(int warp_of_row, int row) const {
    return reinterpret_cast<const RowStats*>(shared + layout.stats)[warp_of_row * kWarpRows + row % kWarpRows];
  }
  // Of all teams; `purpose` 1: what heads choose by.
  __device__ __forceinline__ RowStats* joined(int row, int purpose = 0) const {
    return reinterpret_cast<RowStats*>(shared + layout.joined) + purpose * kMaxRows + row;
  }

  // Of a row, over the teams; factors[i] is what team i's results are multiplied by.
  __device__ __forceinline__ RowStats join_stats(int row, float (&factors)[kMaxWarps]) const {
    const int first = row / kWarpRows;  // the first team's warp
    RowStats sum{-INFINITY, 0};
#pragma unroll
    for (int i = 0; i < kMaxWarps; ++i) {
      if (i < p.teams.count) sum.reference = fmaxf(sum.reference, stats(first + i * p.teams.warps, row).reference);
    }
#pragma unroll
    for (int i = 0; i < kMaxWarps; ++i) {
      factors[i] = 0;
      if (i >= p.teams.count) continue;
      const RowStats own = stats(first + i * p.teams.warps, row);
      factors[i] = part_factor(own, sum.reference, p.scales.exponent);
      if (own.sum != 0) sum.sum += own.sum * factors[i];
    }
    return sum;
  }

  // Of a row, over the cluster's CTAs, by a warp. `factor`: what the results of the CTA of this lane's number are
  // multiplied by.
  __device__ __forceinline__ RowStats join_cluster_stats(int row, int purpose, float& factor) const {
    const std::uint32_t address = ptx::shared_address(joined(row, purpose));
    const auto stats_of = [&](int cta) -> RowStats {
      const auto rank = static_cast<std::uint32_t>(cta);
      return {ptx::load_cluster(address, rank), ptx::load_cluster(address + 4, rank)};
    };
    const RowStats sum = join_parts(p.cluster.value, lane, p.scales.exponent, stats_of);
    factor = lane < p.cluster.value ? part_factor(stats_of(lane), sum.reference, p.scales.exponent) : 0.0f;
    return sum;
  }

  // Calls visit(row, column) for every 32 columns of every row, a warp each; `workers` warps, this being `worker`.
  template <typename Visit>
  __device__ __forceinline__ void each_column(int worker, int workers, Visit visit) const {
    const int chunks = (p.results.out.columns + 31) / 32;
    for (int item = worker; item < part.rows * chunks; item += workers) {
      const int row = item / chunks;
      visit(row, 32 * (item - row * chunks) + lane);
    }
  }

  // A joined value, final or not.
  __device__ __forceinline__ void store(int row, int column, float value, const RowStats& row_stats) const {
    const tile::PackedRow which = part.packed_row(p, row);
    const int head = part.kv_head * p.heads_per_kv_head + which.head;
    const int columns = p.results.out.columns;
    if (p.partials.out != nullptr) {
      const int parts = p.cluster.quotient(p.splits.value);
      const std::int64_t partial =
          (static_cast<std::int64_t>(part.unit) * parts + p.cluster.quotient(part.split)) * p.rows + row;
      if (column < columns) p.partials.out[partial * columns + column] = value;
      if (column == 0) p.partials.stats[partial] = row_stats;
      return;
    }
    if (column < columns) {
      store_result(p.results, C::kType, p.results.out.offset(part.batch, head, which.query) + column,
                   normalised(value, row_stats.sum));
    }
    if (column == 0) {
      store_lse(p.results, p.results.lse.offset(part.batch, head, which.query), row_stats, p.scales.exponent);
    }
  }

  // Joins the teams' rows: final where the CTA is alone, else in place, where the first team's are.
  __device__ __forceinline__ void join_teams() const {
    each_column(warp, p.teams.cta_warps(), [&](int row, int column) {
      const int first = row / kWarpRows;
      float factors[kMaxWarps];
      const RowStats sum = join_stats(row, factors);
      float value = 0;
#pragma unroll
      for (int i = 0; i < kMaxWarps; ++i) {
        if (factors[i] == 0 || column >= C::kHeadDim) continue;
        value = fmaf(factors[i], out(first + i * p.teams.warps, row)[column], value);
      }
      if (p.cluster.value == 1) {
        store(row, column, value, sum);
      } else {
        if (column < C::kHeadDim) out(first, row)[column] = value;
        if (column == 0) *joined(row) = sum;
      }
    });
  }

  // Joins what join_teams() left in the cluster's CTAs, each of which stores some of the columns.
  __device__ __forceinline__ void join_cluster() const {
    const int rank = p.cluster.remainder(part.split);
    const int warps = p.teams.cta_warps();
    each_column(rank * warps + warp, p.cluster.value * warps, [&](int row, int column) {
      float factor;
      const RowStats sum = join_cluster_stats(row, 0, factor);
      const std::uint32_t address = ptx::shared_address(out(row / kWarpRows, row) + min(column, C::kHeadDim - 1));
      float value = 0;
#pragma unroll 4
      for (int cta = 0; cta < p.cluster.value; ++cta) {
        const float theirs = ptx::load_cluster(address, static_cast<std::uint32_t>(cta));
        value = fmaf(__shfl_sync(~0u, factor, cta), theirs, value);
      }
      store(row, column, value, sum);
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
  __syncthreads();  // everything has been read: results go over it
  team.products.deposit(reinterpret_cast<float*>(shared + team.warp * team.layout.out_bytes), team.rows, team.lane);
  __syncthreads();  // results and stats are there
  const CtaResults<C> results{team.p, team.part, team.layout, shared};
  results.join_teams();
  if (team.p.cluster.value == 1) return;
  ptx::sync_whole_cluster();  // every CTA's joined results are there
  results.join_cluster();
  ptx::sync_whole_cluster();  // and have been read: shared memory lives until then
}

}  // namespace dspattn::cuda::decode
