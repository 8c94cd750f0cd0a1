// Heads that share keys and choose together: two kernels around the choice, which needs every key's share of every
// head's weights.
//
//   score_kernel    scores of all keys to the workspace, and of every row the reference and sum over all visible keys
//   choice_kernel   shares of a tile's keys from these, summed over heads; the keys with the largest sums stay; then V
//
// Without K to wait for, a team asks for the V of several tiles at once.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decode/kernel.h"

namespace dspattn::cuda::decode {

// Of a row and a tile, in the workspace.
template <typename C>
__device__ __forceinline__ float* workspace_scores(const Params& p, int unit, int index, int row) {
  return p.together.scores + ((static_cast<std::int64_t>(unit) * p.together.tiles + index) * p.rows + row) * C::kTileK;
}

// All of a team's tiles, after begin().
template <typename C>
__device__ __forceinline__ void write_scores(Team<C>& team) {
  const Params& p = team.p;
  Weigher<C>& weigher = team.weigher;
  const int row = team.first_row + team.lane / weigher.lanes;
  int index = team.first_tile();
  for (int number = 0; index < team.part.tiles.end; ++number, index += team.step()) {
    ptx::cp_async_wait<1>();  // K(i + 1) may still be on its way
    team.sync();
    team.score(number & 1);
    team.load_k(index + 2 * team.step(), number & 1);
    weigher.raise(weigher.mask(team.block_of(index), team.part_of(index)));
    weigher.each_group([&](int group) {
      const float4 x = weigher.scores[group];
      weigher.sum += weigher.weight(x.x) + weigher.weight(x.y) + weigher.weight(x.z) + weigher.weight(x.w);
      reinterpret_cast<float4*>(workspace_scores<C>(p, team.part.unit, index, row))[group] = x;
    });
  }
}

template <typename C>
__global__ void __launch_bounds__(kThreads) score_kernel(const __grid_constant__ Params p) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  ptx::start_next_kernel();  // the choice kernel, which waits for the end of this one
  const Part part = Part::of_cta<C>(p);
  Team<C> team(p, part, shared);
  team.load_q();
  team.begin();
  ptx::cp_async_wait<2>();  // K may still be on its way
  __syncthreads();          // Q is there
  write_scores(team);
  const float sum = team.weigher.total();
  __syncthreads();  // everything has been read
  deposit_stats(team, shared, sum);
  __syncthreads();  // stats are there
  const auto* stats = reinterpret_cast<const RowStats*>(shared + team.layout.stats);
  for (int row = static_cast<int>(threadIdx.x); row < p.rows; row += kThreads) {
    float factors[kWarps];
    p.together.stats[(static_cast<std::int64_t>(part.unit) * p.splits.value + part.split) * p.rows + row] =
        join_teams_stats(p, stats, row, factors);
  }
}

// A team that has scores.
template <typename C>
struct Chooser {
  Team<C>& team;
  const RowStats* whole;  // of every row, over all visible keys: the reference, and 1 / sum
  const int batch;
  const std::uint32_t v_bytes, score_bytes;  // of a tile
  const std::uint32_t v_tiles, score_tiles;  // addresses in shared memory
  const std::uint8_t* scores;

  __device__ __forceinline__ Chooser(Team<C>& of, const RowStats* of_rows)
      : team(of),
        whole(of_rows),
        batch(of.layout.batch),
        v_bytes(static_cast<std::uint32_t>(of.layout.v_bytes)),
        score_bytes(static_cast<std::uint32_t>(of.p.teams.rows * C::kTileK * 4)),
        v_tiles(of.ring),
        score_tiles(of.ring + static_cast<std::uint32_t>(of.layout.batch) * v_bytes),
        scores(of.shared + of.layout.ring + of.team * of.layout.ring_bytes + of.layout.batch * of.layout.v_bytes) {}

  // Tiles of the batch that begins at `index`.
  __device__ __forceinline__ int count(int index) const {
    const int left = (team.part.tiles.end - index + team.step() - 1) / team.step();
    return min(batch, max(left, 0));
  }
  __device__ __forceinline__ void load_scores(int index) const {
    const int chunks = team.p.rows * C::kTileK / 4;
    for (int i = 0; i < count(index); ++i) {
      const float* from = workspace_scores<C>(team.p, team.part.unit, index + i * team.step(), 0);
      for (int chunk = team.thread; chunk < chunks; chunk += team.threads) {
        ptx::cp_async_16(score_tiles + i * score_bytes + 16 * static_cast<std::uint32_t>(chunk), from + 4 * chunk);
      }
    }
  }
  __device__ __forceinline__ float4 scores_of(int number, int group) const {
    const auto* tile = reinterpret_cast<const float4*>(scores + number * score_bytes);
    return tile[team.lane / team.weigher.lanes * C::kGroups + group];
  }

  // Every visible key's share is above 0, every hidden key's is 0: none of these takes a slot from one of those.
  __device__ __forceinline__ float share(float score) const {
    constexpr float kLeast = 1.17549435e-38f;
    const RowStats row = whole[team.first_row + team.lane / team.weigher.lanes];
    if (score == -INFINITY) return 0;
    return fmaxf(ptx::exp2_fast((score - row.reference) * team.p.scales.exponent) * row.sum, kLeast);
  }

  // Chooses the keys of a tile. Returns the largest kept score of this lane's groups.
  __device__ __forceinline__ float choose(int number, std::uint8_t* codes) const {
    Weigher<C>& weigher = team.weigher;
    weigher.each_group([&](int group) {
      const float4 x = scores_of(number, group);
      weigher.scores[group] = make_float4(share(x.x), share(x.y), share(x.z), share(x.w));
    });
    __syncwarp();  // the shares of all heads are there
    const int n_q = team.p.n_q;
    const int query = team.lane / weigher.lanes % n_q;
    float largest = -INFINITY;
    weigher.each_group([&](int group) {
      float4 sum = make_float4(0, 0, 0, 0);
      for (int head = 0; head < team.p.heads_per_kv_head; ++head) {
        const float4 x = reinterpret_cast<const float4*>(team.tiles.scores +
                                                         (head * n_q + query) * team.layout.scores_stride)[group];
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
      }
      const tile::KeptOfFour kept = weigher.select(sum);
      codes[group] = static_cast<std::uint8_t>(
          tile::kept_code(kept, weigher.element(sum, kept.first) == 0, weigher.element(sum, kept.second) == 0));
      const float4 own = scores_of(number, group);
      largest = fmaxf(largest, fmaxf(weigher.element(own, kept.first), weigher.element(own, kept.second)));
      if (std::isnan(own.x + own.y) || std::isnan(own.z + own.w)) weigher.sum = NAN;
    });
    __syncwarp();  // the shares have been read
    return largest;
  }

  __device__ __forceinline__ WarpTiles tiles_of(int number) const {
    return {team.layout, team.shared, team.warp, number};
  }

  // Weights and codes of a batch. Returns by how much the row's results so far shrink.
  __device__ __forceinline__ float weigh(int tiles) {
    Weigher<C>& weigher = team.weigher;
    const int row = team.lane / weigher.lanes;
    float largest = -INFINITY;
    for (int i = 0; i < tiles; ++i) {
      largest = fmaxf(largest, choose(i, tiles_of(i).codes + row * C::kGroups));
    }
    const float shrunk = weigher.raise(largest);
    for (int i = 0; i < tiles; ++i) {
      const WarpTiles of = tiles_of(i);
      weigher.weights = reinterpret_cast<std::uint32_t*>(of.weights + row * team.layout.weights_stride);
      const std::uint8_t* codes = of.codes + row * C::kGroups;
      weigher.each_group([&](int group) {
        const float4 x = scores_of(i, group);
        const std::uint32_t code = codes[group];
        weigher.store_weights(group, weigher.element(x, tile::kept_element(code, 0)),
                              weigher.element(x, tile::kept_element(code, 1)));
      });
    }
    return shrunk;
  }

  __device__ __forceinline__ void accumulate(int tiles) {
    ptx::cp_async_wait<0>();
    team.sync();
    for (int i = 0; i < tiles; ++i) team.accumulate(tiles_of(i), v_tiles + i * v_bytes);
    __syncwarp();  // weights are read
  }

  // All of the team's tiles.
  __device__ __forceinline__ void walk() {
    int before = 0;  // tiles of the batch before, whose V is on its way
    const int step = batch * team.step();
    load_scores(team.first_tile());
    ptx::cp_async_commit();
    for (int index = team.first_tile(); index < team.part.tiles.end; index += step) {
      accumulate(before);  // and this batch's scores are there
      before = count(index);
      team.products.shrink(weigh(before), team.weigher.lanes, team.p.teams.rows, team.lane);
      team.sync();  // V and scores are read, by all warps; weights and codes are written
      for (int i = 0; i < before; ++i) {
        team.load_v(index + i * team.step(), v_tiles + i * v_bytes, team.tiles_of_first(i).codes);
      }
      load_scores(index + step);
      ptx::cp_async_commit();
    }
    accumulate(before);
  }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, ctas_by_registers(C::kType, C::kHeadDim))
    choice_kernel(const __grid_constant__ Params p) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  ptx::start_next_kernel();  // the merge kernel
  const Part part = Part::of_cta<C>(p);
  Team<C> team(p, part, shared);
  team.clear_weights();
  ptx::wait_for_kernels_before();  // scores and stats are written
  auto* whole = reinterpret_cast<RowStats*>(shared + team.layout.stats);
  for (int row = team.warp; row < p.rows; row += kWarps) {
    const std::int64_t first = static_cast<std::int64_t>(part.unit) * p.splits.value * p.rows + row;
    const RowStats joined = join_parts(p.together.stats + first, p.splits.value, p.rows, team.lane, p.scales.exponent);
    if (team.lane == 0) whole[row] = {joined.reference, joined.sum == 0 ? 0.0f : 1.0f / joined.sum};
  }
  __syncthreads();  // every row's reference and sum are there
  Chooser<C>(team, whole).walk();
  finish(team, shared);
}

}  // namespace dspattn::cuda::decode
