// The kernels of heads that choose together where lanes do (together_registers.h):
//
//   together_kernel       a CTA, a cluster, or CTAs that are none have a unit: scores stay in shared memory, rows'
//                         references and sums are told to every warp of the unit (in shared memory, or by the
//                         workspace), then keys are chosen and V is gathered
//   lane_scores_kernel,   the same where a cluster has no room, or clusters would leave too many multiprocessors idle:
//   lane_choice_kernel    scores, references and sums in the workspace
#pragma once

#include <cstdint>

#include "cuda/decode/together_registers.h"
#include "cuda/ptx/tagged.h"

namespace dspattn::cuda::decode {

// Stats of row `row` by warp `warp` of the unit's.
template <typename C>
__device__ __forceinline__ ToldStats* lane_stats(const Team<C>& team, int warp, int row) {
  const std::int64_t warps = team.part.unit * std::int64_t{team.p.splits.value * team.p.teams.count} + warp;
  return reinterpret_cast<ToldStats*>(team.p.together.stats) + warps * team.p.teams.rows + row;
}

// Where the stats of row `row` of the unit's part `split` are told.
template <typename C>
__device__ __forceinline__ std::uint8_t* told_of_part(const Team<C>& team, int split, int row) {
  const Params& p = team.p;
  const std::int64_t part = std::int64_t{team.part.unit} * p.splits.value + split;
  return p.together.told + (part * p.teams.rows + row) * kTaggedBytes;
}

// Joins the stats of all warps of this CTA and tells them to all CTAs of the unit, as those of part `split`.
template <typename C>
__device__ __forceinline__ void tell_part(const Team<C>& team, const TogetherRows<C>& rows, int split) {
  const Params& p = team.p;
  auto* told = reinterpret_cast<ToldStats*>(team.shared + p.layout.told);
  const ToldStats of_warp = rows.own_stats();
  if (rows.t == 0 && rows.g == rows.row) told[team.team * p.teams.rows + rows.row] = of_warp;
  __syncthreads();  // all warps' are there
  const int row = static_cast<int>(threadIdx.x);
  if (row >= p.teams.rows) return;
  ToldStats joined{-INFINITY, 0};
  for (int i = 0; i < p.teams.count; ++i)
    joined.reference = fmaxf(joined.reference, told[i * p.teams.rows + row].reference);
  for (int i = 0; i < p.teams.count; ++i) {
    const ToldStats& own = told[i * p.teams.rows + row];
    joined.sum += own.sum * part_factor(own, joined.reference, p.scales.exponent);
  }
  ptx::store_tagged(told_of_part(team, split, row), make_float2(joined.reference, joined.sum), p.arrivals.tag);
}

// The first part after `own` whose stats nobody has told, counted from there; or as many as there are. By all threads;
// they agree.
template <typename C>
__device__ __forceinline__ int missing_part(const Team<C>& team, int own) {
  const int parts = team.p.splits.value;
  auto* found = reinterpret_cast<int*>(team.shared + team.layout.touched);
  if (team.warp == 0) {
    int first = parts;
    for (int i = team.lane; i < parts; i += 32) {
      float2 x;
      const int split = own + i < parts ? own + i : own + i - parts;
      if (ptx::load_tagged(told_of_part(team, split, 0), x) != team.p.arrivals.tag) first = min(first, i);
    }
    for (int offset = 16; offset > 0; offset /= 2) first = min(first, __shfl_xor_sync(~0u, first, offset));
    if (team.lane == 0) *found = first;
  }
  __syncthreads();  // it is found
  return *found;
}

// Tells all CTAs of the unit of this one's part and joins what it hears of all parts. Nothing says that the CTAs are
// resident at once: other kernels may hold multiprocessors. So a CTA that has not heard of a part for long finds out
// for itself, with the same bits, and tells the others: it waits for none that may not have begun.
template <typename C>
__device__ __forceinline__ RowStats hear_of_parts(Part& part, Team<C>& team, TogetherRows<C>& rows) {
  const Params& p = team.p;
  const tile::TileRange own = part.tiles;
  auto* heard = reinterpret_cast<unsigned*>(team.shared + team.layout.touched);  // by warps, of two rounds
  int split = part.split;
#pragma unroll 1
  for (;;) {
    tell_part(team, rows, split);
#pragma unroll 1
    for (int round = 0; round < ptx::kPatience; ++round) {
      std::uint64_t differs = 0;
      const RowStats whole = rows.template whole_row<2>(p.splits.value, [&](int i) {
        float2 x;
        differs |= ptx::load_tagged(told_of_part(team, i, rows.row), x) ^ p.arrivals.tag;
        return ToldStats{x.x, x.y};
      });
      const bool all = __all_sync(~0u, differs == 0) != 0;
      if (team.lane == 0) heard[(round & 1) * kMaxWarps + team.warp] = all ? 1 : 0;
      __syncthreads();  // all warps have asked
      unsigned warps = 0;
      for (int i = 0; i < p.teams.count; ++i) warps += heard[(round & 1) * kMaxWarps + i];
      if (warps == static_cast<unsigned>(p.teams.count)) {
        part.tiles = own;
        return whole;
      }
    }
    const int after = missing_part(team, part.split);
    if (after == p.splits.value) continue;
    split = part.split + after < p.splits.value ? part.split + after : part.split + after - p.splits.value;
    part.tiles = part.template tiles_of<C>(p, split);
    begin_keys(team);
    rows.score(false);
  }
}

template <typename C>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) together_kernel(const __grid_constant__ Params p) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  ptx::start_next_kernel();
  touch_parameters(p, shared);
  Part part = Part::of_cta<C>(p);
  const Mail<C> mail{p, part, shared};
  mail.open();
  Team<C> team(p, part, shared);
  ptx::wait_for_kernels_before();  // inputs are written
  team.load_q(p.teams.rows);
  begin_keys(team);
  begin_arrivals(p, part);
  ptx::cp_async_wait<2>();  // K may still be on its way
  __syncthreads();          // Q is there
  RegisterRows<C> products(team);
  TogetherRows<C> rows(team, products, shared + team.layout.kept + team.team * team.layout.kept_bytes, 1);
  rows.score();
  RowStats whole;
  if (p.together.told != nullptr) {
    whole = hear_of_parts(part, team, rows);
  } else {
    mail.wait();
    rows.tell(mail);
    if (p.cluster.value == 1) {
      __syncthreads();  // every warp's stats are there
    } else {
      ptx::await_from_cluster(mail.arrived(0));
    }
    whole = rows.template whole_row<4>(p.cluster.value * p.teams.count, [&](int i) { return *mail.told(i, rows.row); });
  }
  rows.choose_all(whole);
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
  begin_arrivals(p, part);
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
