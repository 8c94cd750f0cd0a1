// Attention of few query rows against many keys, bound by memory's bandwidth: the keys of a (sequence, key head, tile
// of rows) are split over CTAs, and a CTA's over its teams of warps (config.h).
//
// A team walks its key tiles. Where rows keep different keys all of V is wanted (walk_whole); K and V tiles alternate
// in a ring of three, in the order of their use:
//
//   await K(i); scores(i); ask for V(i + 1) where K(i) was
//   weights(i) from scores(i)
//   await V(i); output += weights(i) V(i); ask for K(i + 2) where V(i) was
//
// Where all rows keep the same, V's kept rows alone are gathered (walk_gathered), and used a tile later:
//
//   await K(i); scores(i); ask for K(i + 2) where K(i) was
//   weights(i) from scores(i); ask for the kept rows of V(i)
//   await V(i - 1); output += weights(i - 1) V(i - 1)
//
// From scores to weights everything is in registers (weigh16.h), or in shared memory where these are too few (weigh.h).
// In the end the teams' results are joined in shared memory, and those of a cluster's CTAs (join.h). Requires sm_80;
// clusters sm_90; tensors of any stride.
#pragma once

#include <cstdint>

#include "cuda/decode/join.h"
#include "cuda/decode/team.h"
#include "cuda/decode/weigh16.h"

namespace dspattn::cuda::decode {

// The first tiles: three groups of copies.
template <typename C>
__device__ __forceinline__ void begin_whole(const Team<C>& team) {
  team.load_k(team.first_tile(), team.place(0));
  team.load_v(team.first_tile(), team.place(1));
  team.load_k(team.first_tile() + team.step(), team.place(2));
}

// All of a team's tiles, after begin_whole(): weighed = weigh(index, k) when K is there, which asks
// for the V of the tile after as soon as K is read, then accumulate(weighed, v).
template <typename C, typename Weigh, typename Accumulate>
__device__ __forceinline__ void walk_whole(Team<C>& team, Weigh weigh, Accumulate accumulate) {
  int place = 0;  // of K(i), load 2 i of the team: 2 i modulo 3
  for (int index = team.first_tile(); index < team.part.tiles.end; index += team.step()) {
    const std::uint32_t k = team.place(place), v = team.place(place == 2 ? 0 : place + 1);
    team.weigher.look_up(block_of<C>(index));
    ptx::cp_async_wait<2>();  // V(i) and K(i + 1) may still be on their way
    team.sync();
    const auto weighed = weigh(index, k);
    ptx::cp_async_wait<2>();  // K(i + 1) and V(i + 1) may still be on their way
    team.sync();              // and weights and codes are written
    accumulate(weighed, v);
    team.sync();  // V(i) is read, by all warps, and weights are
    team.load_k(index + 2 * team.step(), v);
    place = place == 0 ? 2 : place - 1;
  }
}

// With weights in shared memory.
template <typename C>
__device__ __forceinline__ void walk_stored(Team<C>& team) {
  walk_whole(
      team,
      [&](int index, std::uint32_t k) {
        team.score(k);
        team.load_v(index + team.step(), k);
        const float shrunk = team.weigher.weigh(block_of<C>(index), part_of<C>(index));
        team.products.shrink(shrunk, team.weigher.lanes, team.p.teams.rows, team.lane);
        return 0;
      },
      [&](int, std::uint32_t v) { team.accumulate_whole(team.tiles, v); });
}

// With weights in registers.
template <typename C>
__device__ __forceinline__ void walk_registers(Team<C>& team, RegisterRows<C>& rows) {
  using Operands = typename RegisterRows<C>::Operands;
  walk_whole(
      team,
      [&](int index, std::uint32_t k) {
        float scores[C::kTileK / 8][4];
        rows.score(k, scores);
        team.load_v(index + team.step(), k);
        const Operands operands = rows.weigh(scores, index);
        rows.shrink(operands.shrink);
        return operands;
      },
      [&](const Operands& operands, std::uint32_t v) { rows.accumulate(operands, v); });
}

// The first two K tiles: two groups of copies.
template <typename C>
__device__ __forceinline__ void begin_keys(const Team<C>& team) {
  team.load_k(team.first_tile(), team.place(0));
  team.load_k(team.first_tile() + team.step(), team.place(1));
}

// All of a team's tiles, after begin_keys() and a group of copies of nothing; a team is one warp. weighed =
// weigh(index, k, buffer) when K is there, which asks for the K of two tiles later as soon as this one is read and
// leaves the codes of what is kept; a tile later, when the kept rows of V are there, accumulate(weighed, v, buffer).
// shrink(weighed) follows the tile before's: what is added up by then is relative to the reference before this tile.
template <typename C, typename Weigh, typename Accumulate, typename Shrink>
__device__ __forceinline__ void walk_gathered(Team<C>& team, Weigh weigh, Accumulate accumulate, Shrink shrink) {
  const auto v = [&](int buffer) { return team.place(2) + static_cast<std::uint32_t>(buffer * team.layout.v_bytes); };
  int index = team.first_tile();
  if (index >= team.part.tiles.end) return;
  decltype(weigh(0, 0u, 0)) before{};
  int number = 0;
  for (; index < team.part.tiles.end; ++number, index += team.step()) {
    const int buffer = number & 1;
    team.weigher.look_up(block_of<C>(index));
    ptx::cp_async_wait<2>();  // K(i + 1) and V(i - 1) may still be on their way
    team.sync();
    const auto weighed = weigh(index, team.place(buffer), buffer);
    team.sync();  // codes are written, and weights where they are in shared memory
    team.gather_v(index, v(buffer), team.tiles_of(buffer).codes);
    ptx::cp_async_commit();
    if (number > 0) {
      ptx::cp_async_wait<2>();  // K(i + 2) and V(i) may still be on their way
      team.sync();
      accumulate(before, v(buffer ^ 1), buffer ^ 1);
    }
    shrink(weighed);
    before = weighed;
  }
  ptx::cp_async_wait<0>();
  team.sync();
  accumulate(before, v((number - 1) & 1), (number - 1) & 1);
}

// With weights in shared memory.
template <typename C>
__device__ __forceinline__ void gather_stored(Team<C>& team) {
  walk_gathered(
      team,
      [&](int index, std::uint32_t k, int buffer) {
        team.score(k);
        team.load_k(index + 2 * team.step(), k);
        team.weigher.write_to(team.tiles_of(buffer), team.layout);
        return team.weigher.weigh(block_of<C>(index), part_of<C>(index));
      },
      [&](float, std::uint32_t v, int buffer) { team.accumulate_gathered(team.tiles_of(buffer), v); },
      [&](float by) { team.products.shrink(by, team.weigher.lanes, team.p.teams.rows, team.lane); });
}

// With weights in registers.
template <typename C>
__device__ __forceinline__ void gather_registers(Team<C>& team, RegisterRows<C>& rows) {
  using Operands = typename RegisterRows<C>::Operands;
  walk_gathered(
      team,
      [&](int index, std::uint32_t k, int buffer) {
        float scores[C::kTileK / 8][4];
        rows.score(k, scores);
        team.load_k(index + 2 * team.step(), k);
        return rows.weigh(scores, index, team.tiles_of(buffer).codes);
      },
      [&](const Operands& operands, std::uint32_t v, int) { rows.accumulate_gathered(operands, v); },
      [&](const Operands& operands) { rows.shrink(operands.shrink); });
}

template <typename C>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) decode_kernel(const __grid_constant__ Params p) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  ptx::start_next_kernel();  // which waits for the end of this one
  touch_parameters(p, shared);
  const Part part = Part::of_cta<C>(p);
  const Mail<C> mail{p, part, shared};
  mail.open();
  Team<C> team(p, part, shared);
  ptx::wait_for_kernels_before();  // inputs are written, and what the workspace held is read
  team.load_q();
  const bool gathers = p.teams.gather != 0;
  if (gathers) {
    begin_keys(team);
    ptx::cp_async_commit();  // of nothing: three groups of copies either way
  } else {
    begin_whole(team);
  }
  begin_arrivals(p, part);
  if constexpr (!weighs_in_registers(C::kType, C::kHeadDim)) {
    team.clear_weights();
    ptx::cp_async_wait<3>();  // K and V may still be on their way
    __syncthreads();          // Q is there, and weights are cleared
    gathers ? gather_stored(team) : walk_stored(team);
    team.weigher.deposit_stats(stats_of_warp(team, shared));
  } else {
    RegisterRows<C> rows(team);
    ptx::cp_async_wait<3>();  // K and V may still be on their way
    __syncthreads();          // Q is there
    gathers ? gather_registers(team, rows) : walk_registers(team, rows);
    rows.deposit_stats(stats_of_warp(team, shared));
  }
  mail.wait();
  finish(team, mail, shared);
}

}  // namespace dspattn::cuda::decode
