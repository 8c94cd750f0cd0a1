// Attention of few query rows against many keys, bound by memory's bandwidth: the keys of a (sequence, key head) are
// split over CTAs, and a CTA's over its teams of warps (config.h).
//
// A team walks its key tiles. For tile i:
//
//   await K(i); scores(i) to shared memory; ask for K(i + 2) where K(i) was
//   await V(i - 1); output += weights(i - 1) V(i - 1)
//   weights(i) from scores(i); ask for V(i), of which with one row only the kept rows
//
// Two K tiles are on their way while a team waits for V. In the end the teams' results are joined, and either are the
// CTA's, for the merge kernel, or final. Requires sm_80; tensors of any stride.
#pragma once

#include <cstdint>

#include "cuda/decode/results.h"
#include "cuda/decode/team.h"

namespace dspattn::cuda::decode {

// All of a team's tiles, after begin().
template <typename C>
__device__ __forceinline__ void walk(Team<C>& team) {
  const std::uint32_t v = team.ring + 2 * team.layout.tile_bytes;
  const std::uint8_t* kept = team.tiles_of_first().codes;
  int index = team.first_tile();
  if (index >= team.part.tiles.end) return;
  for (int number = 0; index < team.part.tiles.end; ++number, index += team.step()) {
    // Asked for after K(i): K(i + 1), and V(i - 1) but for the first tile.
    if (number == 0) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<2>();
    }
    team.sync();
    team.score(number & 1);
    team.load_k(index + 2 * team.step(), number & 1);
    if (number > 0) {
      ptx::cp_async_wait<1>();
      team.sync();
      team.accumulate(team.tiles, v);
    }
    __syncwarp();  // weights are read
    const float shrunk = team.weigher.weigh(team.block_of(index), team.part_of(index));
    team.products.shrink(shrunk, team.weigher.lanes, team.p.teams.rows, team.lane);
    team.sync();  // V(i - 1) is read, by all warps; weights and codes are written
    team.load_v(index, v, kept);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<0>();
  team.sync();
  team.accumulate(team.tiles, v);
}

// Of a row, over the teams; factors[i] is what team i's results are multiplied by.
__device__ __forceinline__ RowStats join_teams_stats(const Params& p, const RowStats* stats, int row,
                                                     float (&factors)[kWarps]) {
  const int first = row / kWarpRows;  // the first team's warp
  RowStats joined{-INFINITY, 0};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const int warp = first + i * p.teams.warps;
    if (warp < kWarps) joined.reference = fmaxf(joined.reference, stats[warp * kWarpRows + row % kWarpRows].reference);
  }
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const int warp = first + i * p.teams.warps;
    factors[i] = 0;
    if (warp >= kWarps) continue;
    const RowStats own = stats[warp * kWarpRows + row % kWarpRows];
    factors[i] = part_factor(own, joined.reference, p.scales.exponent);
    if (own.sum != 0) joined.sum += own.sum * factors[i];
  }
  return joined;
}

// Leaves the rows' stats of this warp where the CTA joins them.
template <typename C>
__device__ __forceinline__ void deposit_stats(const Team<C>& team, std::uint8_t* shared, float sum) {
  if (team.weigher.first_group != 0) return;
  auto* stats = reinterpret_cast<RowStats*>(shared + team.layout.stats) + team.warp * kWarpRows;
  stats[team.lane / team.weigher.lanes] = {team.weigher.reference, sum};
}

// Joins the teams' rows, a warp a row, and writes the CTA's results.
template <typename C>
__device__ __forceinline__ void join_teams(const Params& p, const Part& part, const SharedLayout& layout,
                                           const std::uint8_t* shared) {
  const auto* stats = reinterpret_cast<const RowStats*>(shared + layout.stats);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int row = static_cast<int>(threadIdx.x) >> 5; row < p.rows; row += kWarps) {
    const int first = row / kWarpRows;  // the first team's warp
    const int in_warp = row % kWarpRows;
    float factors[kWarps];
    const RowStats joined = join_teams_stats(p, stats, row, factors);
    const tile::PackedRow which = tile::packed_row(row, p.n_q);
    const int head = part.kv_head * p.heads_per_kv_head + which.head;
    const std::int64_t partial = (static_cast<std::int64_t>(part.unit) * p.splits.value + part.split) * p.rows + row;
    const int columns = p.results.out.columns;
    for (int column = lane; column < columns; column += 32) {
      float value = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        const int warp = first + i * p.teams.warps;
        if (factors[i] == 0) continue;
        const auto* out = reinterpret_cast<const float*>(shared + warp * layout.out_bytes);
        value = fmaf(factors[i], out[in_warp * C::kHeadDim + column], value);
      }
      if (p.partials.out != nullptr) {
        p.partials.out[partial * columns + column] = value;
      } else {
        store_result(p.results, C::kType, p.results.out.offset(part.batch, head, which.query) + column,
                     normalised(value, joined.sum));
      }
    }
    if (lane != 0) continue;
    if (p.partials.out != nullptr) {
      p.partials.stats[partial] = joined;
    } else {
      store_lse(p.results, p.results.lse.offset(part.batch, head, which.query), joined, p.scales.exponent);
    }
  }
}

// After the last tile: joins the teams' results and writes them.
template <typename C>
__device__ __forceinline__ void finish(Team<C>& team, std::uint8_t* shared) {
  const float sum = team.weigher.total();
  __syncthreads();  // everything has been read: results go over it
  team.products.deposit(reinterpret_cast<float*>(shared + team.warp * team.layout.out_bytes), team.lane);
  deposit_stats(team, shared, sum);
  __syncthreads();  // results and stats are there
  join_teams<C>(team.p, team.part, team.layout, shared);
}

template <typename C>
__global__ void __launch_bounds__(kThreads, ctas_by_registers(C::kType, C::kHeadDim))
    decode_kernel(const __grid_constant__ Params p) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  ptx::start_next_kernel();  // the merge kernel, which waits for the end of this one
  const Part part = Part::of_cta<C>(p);
  Team<C> team(p, part, shared);
  team.load_q();
  team.begin();
  team.clear_weights();
  ptx::cp_async_wait<2>();  // K may still be on its way
  __syncthreads();          // Q is there, and weights are cleared
  walk(team);
  finish(team, shared);
}

}  // namespace dspattn::cuda::decode
