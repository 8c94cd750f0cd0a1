// The kernels of heads that choose together where lanes do (together_registers.h):
//
//   together_kernel       a CTA, a cluster, or CTAs of a cooperative launch have a unit: scores stay in shared memory,
//                         rows' references and sums are told to every warp of the unit (in shared memory, or by the
//                         workspace), then keys are chosen and V is gathered
//   lane_scores_kernel,   the same where a cluster has no room, or clusters would leave too many multiprocessors idle:
//   lane_choice_kernel    scores, references and sums in the workspace
#pragma once

#include <cstdint>

#include "cuda/decode/together_registers.h"
#include "cuda/ptx/cooperative.h"

namespace dspattn::cuda::decode {

// Stats of row `row` by warp `warp` of the unit's.
template <typename C>
__device__ __forceinline__ ToldStats* lane_stats(const Team<C>& team, int warp, int row) {
  const std::int64_t warps = team.part.unit * std::int64_t{team.p.splits.value * team.p.teams.count} + warp;
  return reinterpret_cast<ToldStats*>(team.p.together.stats) + warps * team.p.teams.rows + row;
}

// Leaves the stats of this warp's rows to all warps of the unit, whose CTAs are resident, and waits for theirs.
template <typename C>
__device__ __forceinline__ void tell_by_workspace(const Team<C>& team, const TogetherRows<C>& rows) {
  const Params& p = team.p;
  const ToldStats own = rows.own_stats();
  if (rows.t == 0 && rows.g == rows.row) {
    *lane_stats(team, team.part.split * p.teams.count + team.team, rows.row) = own;
  }
  __syncthreads();  // the CTA's stats are written
  if (threadIdx.x == 0) {
    ptx::arrive_at(p.together.arrived + team.part.unit);
    ptx::await_arrivals(p.together.arrived + team.part.unit, static_cast<unsigned>(p.splits.value));
  }
  __syncthreads();  // all CTAs' are
}

template <typename C>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) together_kernel(const __grid_constant__ Params p) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  ptx::start_next_kernel();
  touch_parameters(p, shared);
  const Part part = Part::of_cta<C>(p);
  const Mail<C> mail{p, part, shared};
  mail.open();
  Team<C> team(p, part, shared);
  ptx::wait_for_kernels_before();  // inputs are written
  team.load_q(p.teams.rows);
  begin_keys(team);
  ptx::cp_async_wait<2>();  // K may still be on its way
  __syncthreads();          // Q is there
  RegisterRows<C> products(team);
  TogetherRows<C> rows(team, products, shared + team.layout.kept + team.team * team.layout.kept_bytes, 1);
  rows.score();
  if (p.together.arrived != nullptr) {
    tell_by_workspace(team, rows);
    rows.choose_all(rows.template whole_row<16>(p.splits.value * p.teams.count,
                                                [&](int i) { return *lane_stats(team, i, rows.row); }));
  } else {
    mail.wait();
    rows.tell(mail);
    if (p.cluster.value == 1) {
      __syncthreads();  // every warp's stats are there
    } else {
      ptx::await_from_cluster(mail.arrived(0));
    }
    rows.choose_all(
        rows.template whole_row<4>(p.cluster.value * p.teams.count, [&](int i) { return *mail.told(i, rows.row); }));
  }
  rows.deposit_results(stats_of_warp(team, shared));
  finish(team, mail, shared);
}

// Where the scores of the team's first tile are, in the workspace.
template <typename C>
__device__ __forceinline__ void* lane_scores(const Team<C>& team) {
  const std::int64_t tile = static_cast<std::int64_t>(team.part.unit) * team.p.together.tiles + team.first_tile();
  return team.p.together.scores + tile * team.p.teams.rows * C::kTileK;
}

template <typename C>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) lane_scores_kernel(const __grid_constant__ Params p) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  ptx::start_next_kernel();  // the choice kernel, which waits for the end of this one
  touch_parameters(p, shared);
  const Part part = Part::of_cta<C>(p);
  Team<C> team(p, part, shared);
  ptx::wait_for_kernels_before();  // inputs are written
  team.load_q(p.teams.rows);
  begin_keys(team);
  ptx::cp_async_wait<2>();  // K may still be on its way
  __syncthreads();          // Q is there
  RegisterRows<C> products(team);
  TogetherRows<C> rows(team, products, lane_scores(team), team.step());
  rows.score();
  const ToldStats own = rows.own_stats();
  if (rows.t == 0 && rows.g == rows.row) *lane_stats(team, part.split * p.teams.count + team.team, rows.row) = own;
}

template <typename C>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) lane_choice_kernel(const __grid_constant__ Params p) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  ptx::start_next_kernel();  // the merge kernel
  touch_parameters(p, shared);
  const Part part = Part::of_cta<C>(p);
  const Mail<C> mail{p, part, shared};
  mail.open();
  Team<C> team(p, part, shared);
  ptx::wait_for_kernels_before();  // scores and stats are written
  RegisterRows<C> products(team);
  TogetherRows<C> rows(team, products, lane_scores(team), team.step());
  const RowStats whole = rows.template whole_row<16>(p.splits.value * p.teams.count,
                                                     [&](int i) { return *lane_stats(team, i, rows.row); });
  rows.hides = !team.weigher.plain || p.pages.table != nullptr || products.begin > block_of<C>(part.tiles.begin) ||
               products.end < block_of<C>(part.tiles.end - 1) + tile::kBlockKeys;
  rows.choose_all(whole);
  rows.deposit_results(stats_of_warp(team, shared));
  mail.wait();
  finish(team, mail, shared);
}

}  // namespace dspattn::cuda::decode
