// Heads that share keys and choose together. The choice needs every key's share of every head's weights, hence the
// scores of all keys, before any row of V.
//
// Of one query and few heads: together_registers.h. Here of several queries and of many heads:
//
//   score_kernel      scores of all keys to the workspace, and of every row the reference and sum over all visible keys
//   choice_kernel     keys are chosen by these, and V is gathered
//
// Scores are kept as the fp16 numbers that other choices compare (docs/notation.md).
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decode/kernel.h"

namespace dspattn::cuda::decode {

// All of a team's tiles, after begin_keys(): scores of row r of tile number i, of which the unit has number `index`, go
// to place(i, index) + r * tile keys.
template <typename C, typename Place>
__device__ __forceinline__ void write_scores(Team<C>& team, RegisterRows<C>& rows, Place place) {
  int index = team.first_tile();
  for (int number = 0; index < team.part.tiles.end; ++number, index += team.step()) {
    team.weigher.look_up(block_of<C>(index));
    ptx::cp_async_wait<1>();  // K(i + 1) may still be on its way
    team.sync();
    float scores[C::kTileK / 8][4];
    rows.score(team.place(number & 1), scores);
    team.load_k(index + 2 * team.step(), team.place(number & 1));
    rows.store(scores, index, place(number, index));
  }
}

// A team's scores, in the workspace: of the unit's tile `index`.
template <typename C>
__device__ __forceinline__ std::uint16_t* workspace_scores(const Params& p, int unit, int index) {
  return p.together.scores + (static_cast<std::int64_t>(unit) * p.together.tiles + index) * p.rows * C::kTileK;
}

// Chooses the keys of a team's tiles and adds up their V: kChoiceTiles tiles at once, a step, with the V of the step
// before on its way.
template <typename C>
struct Chooser {
  // Weights in fp16 have few small numbers: of shares of a long row these are too few.
  static constexpr float kShareScaleLog2 = C::kType == DType::bf16 ? 0 : 15;
  static constexpr float kShareScale = C::kType == DType::bf16 ? 1 : 32768;
  // Of a team's part of a row: weights of which sums are less may have lost bits.
  static constexpr float kLeastShare = C::kType == DType::bf16 ? 0x1p-60f : 0x1p-3f;
  static constexpr int kRoundsAtOnce = C::kHeadDim <= 64 ? 2 : 1;

  Team<C>& team;
  const RowStats* whole;  // of every row, over all visible keys: what scores are shifted by, and the sum

  __device__ __forceinline__ Chooser(Team<C>& own_team, const RowStats* row_stats) : team(own_team), whole(row_stats) {}

  // Tiles of the step that begins at `index`.
  __device__ __forceinline__ int count(int index) const {
    const int left = (team.part.tiles.end - index + team.step() - 1) / team.step();
    return min(kChoiceTiles, max(left, 0));
  }
  // A group of copies.
  __device__ __forceinline__ void load_scores(int index, int half) const {
    const int chunks = team.p.rows * C::kTileK / 8;
    for (int i = 0; i < count(index); ++i) {
      const std::uint16_t* from = workspace_scores<C>(team.p, team.part.unit, index + i * team.step());
      const auto to =
          team.ring + static_cast<std::uint32_t>(team.layout.batch_scores +
                                                 (half * kChoiceTiles + i) * team.layout.batch_scores_bytes);
      for (int chunk = team.lane; chunk < chunks; chunk += 32) {
        ptx::cp_async_16(to + 16 * static_cast<std::uint32_t>(chunk), from + 8 * chunk);
      }
    }
    ptx::cp_async_commit();
  }
  // Of the warp's rows, a tile's keys each: of tile `i` of step `number`.
  __device__ __forceinline__ const uint2* scores_of(int number, int i) const {
    const SharedLayout& s = team.layout;
    const int at =
        s.ring + team.team * s.ring_bytes + s.batch_scores + ((number & 1) * kChoiceTiles + i) * s.batch_scores_bytes;
    return reinterpret_cast<const uint2*>(team.shared + at);
  }
  __device__ __forceinline__ static float4 unpacked(uint2 scores) {
    float4 x;
    ptx::unpack_f16x2(scores.x, x.x, x.y);
    ptx::unpack_f16x2(scores.y, x.z, x.w);
    return x;
  }
  __device__ __forceinline__ WarpTiles tiles_of(int number, int i) const {
    return team.tiles_of((number & 1) * kChoiceTiles + i);
  }
  __device__ __forceinline__ std::uint32_t v_tile(int number, int i) const {
    return team.ring + static_cast<std::uint32_t>(((number & 1) * kChoiceTiles + i) * team.layout.v_bytes);
  }

  // 2^(exponent * score + shift): every visible key's share is above 0, every hidden key's is 0. None of these takes a
  // slot from one of those.
  __device__ __forceinline__ float share(float score, float shift) const {
    constexpr float kLeast = -126;  // of finite numbers' exponents
    const float power = fmaxf(fmaf(score, team.p.scales.exponent, shift), kLeast);
    return score == -INFINITY ? 0.0f : ptx::exp2_fast(power);
  }

  // Sums shares over the heads, of this lane's query and group: the same bits in all of them.
  __device__ __forceinline__ void sum_over_heads(float4 (&shares)[kChoiceTiles]) const {
    const Weigher<C>& weigher = team.weigher;
    const auto add = [&](int tile, const float4& x) {
      float4& sum = shares[tile];
      sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    };
    if (team.p.n_q == 1) {
      for (int offset = weigher.lanes; offset < 32; offset *= 2) {
#pragma unroll
        for (int i = 0; i < kChoiceTiles; ++i) add(i, shuffled(shares[i], team.lane ^ offset));
      }
      return;
    }
    const float4 own[kChoiceTiles] = {shares[0], shares[1]};
    for (float4& sum : shares) sum = make_float4(0, 0, 0, 0);
    const int query = team.p.packed_row(weigher.row).query;
#pragma unroll 1
    for (int head = 0; head < team.p.heads_per_kv_head; ++head) {
      const int from = (head * team.p.n_q + query) * weigher.lanes + weigher.first_group;
#pragma unroll
      for (int i = 0; i < kChoiceTiles; ++i) add(i, shuffled(own[i], from));
    }
  }
  __device__ __forceinline__ static float4 shuffled(const float4& x, int lane) {
    return make_float4(__shfl_sync(~0u, x.x, lane), __shfl_sync(~0u, x.y, lane), __shfl_sync(~0u, x.z, lane),
                       __shfl_sync(~0u, x.w, lane));
  }

  // Chooses the keys of this lane's group number `round` of both tiles of a step; leaves codes, and as weights the
  // shares. Where these are `careful` instead the kept scores, of which the largest is returned. Of lanes without a
  // group, or tiles that there are not, scores are -inf.
  __device__ __forceinline__ float choose(int number, int tiles, int round, bool careful) const {
    Weigher<C>& weigher = team.weigher;
    const int group = weigher.first_group + round * weigher.lanes;
    const bool has_group = weigher.has_row && group < C::kGroups;
    const float shift = has_group ? whole[weigher.row].reference : 0.0f;
    float4 scores[kChoiceTiles], shares[kChoiceTiles], sums[kChoiceTiles];
#pragma unroll
    for (int i = 0; i < kChoiceTiles; ++i) {
      scores[i] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      if (has_group && i < tiles) scores[i] = unpacked(scores_of(number, i)[weigher.row * C::kGroups + group]);
      const float4& x = scores[i];
      shares[i] = make_float4(share(x.x, shift), share(x.y, shift), share(x.z, shift), share(x.w, shift));
      sums[i] = shares[i];
    }
    sum_over_heads(sums);
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kChoiceTiles; ++i) {
      const tile::KeptOfFour kept = weigher.select(sums[i]);
      if (!has_group) continue;
      tiles_of(number, i).codes[weigher.row * C::kGroups + group] = static_cast<std::uint8_t>(
          tile::kept_code(kept, weigher.element(sums[i], kept.first) == 0, weigher.element(sums[i], kept.second) == 0));
      const auto picked = [&](int e) {
        const float score = weigher.element(scores[i], e), own = weigher.element(shares[i], e);
        return careful ? score : own;
      };
      const float first = picked(kept.first), second = picked(kept.second);
      largest = fmaxf(largest, fmaxf(first, second));
      if (team.p.keeps_rest())
        weigher.add_pruned(kept, [&](int e) { return weigher.element(shares[i], e) * kShareScale; });
      weights_of(number, i)[group] =
          careful ? ptx::pack_f16x2(first, second) : weigher.packed(first * kShareScale, second * kShareScale);
    }
    return largest;
  }

  // Of this lane's row.
  __device__ __forceinline__ std::uint32_t* weights_of(int number, int i) const {
    return reinterpret_cast<std::uint32_t*>(tiles_of(number, i).weights +
                                            team.weigher.row * team.layout.weights_stride);
  }

  // Weights and codes of a step. Returns by how much the row's results so far shrink.
  __device__ __forceinline__ float weigh(int number, int tiles, bool careful) const {
    Weigher<C>& weigher = team.weigher;
    float largest = -INFINITY;
    const int rounds = max(C::kGroups >> team.p.lane_shift, 1);
#pragma unroll kRoundsAtOnce
    for (int round = 0; round < rounds; ++round) largest = fmaxf(largest, choose(number, tiles, round, careful));
    if (!careful) return 1.0f;
    const float shrunk = weigher.raise(largest);
    weigher.template each_group<1>([&](int group) {
#pragma unroll
      for (int i = 0; i < kChoiceTiles; ++i) {
        std::uint32_t& kept = weights_of(number, i)[group];
        float first, second;
        ptx::unpack_f16x2(kept, first, second);
        kept = weigher.weighed(first, second);
      }
    });
    return shrunk;
  }

  __device__ __forceinline__ void load_v(int number, int tiles, int index) const {
#pragma unroll
    for (int i = 0; i < kChoiceTiles; ++i) {
      if (i >= tiles) break;
      if (team.p.teams.gather != 0) {
        team.gather_v(index + i * team.step(), v_tile(number, i), tiles_of(number, i).codes);
      } else {
        team.copy_v(index + i * team.step(), v_tile(number, i));
      }
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void accumulate(int number, int tiles) const {
    team.sync();
#pragma unroll
    for (int i = 0; i < kChoiceTiles; ++i) {
      if (i >= tiles) break;
      if (team.p.teams.gather != 0) {
        team.accumulate_gathered(tiles_of(number, i), v_tile(number, i));
      } else {
        team.accumulate_whole(tiles_of(number, i), v_tile(number, i));
      }
    }
  }

  // All of the team's tiles. Shares are good weights but where a row keeps next to nothing of its own, which others
  // chose away: then they are beyond the range of the inputs' type, and everything is done again with care, relative to
  // what is kept.
  __device__ __forceinline__ void walk() const {
    Weigher<C>& weigher = team.weigher;
    const float shift = weigher.has_row ? whole[weigher.row].reference : 0.0f;
    weigher.reference = -(shift + kShareScaleLog2) / team.p.scales.exponent;
#pragma unroll 1
    for (int careful = 0; careful < 2; ++careful) {
      walk(careful != 0);
      // With rest = mean results are relative to all keys' weights, of which these are what they are.
      if (careful != 0 || team.p.keeps_rest() || weights_are_sound()) break;
      weigher.reference = -INFINITY;
      weigher.sum = 0;
      for (auto& o : team.products.out) {
        for (float& x : o) x = 0;
      }
    }
  }
  // Of all the warp's rows.
  __device__ __forceinline__ bool weights_are_sound() const {
    float total = team.weigher.sum;
    for (int offset = team.weigher.lanes / 2; offset > 0; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
    return __all_sync(~0u, !(total > 0 && total < kLeastShare)) != 0;
  }
  __device__ __forceinline__ void walk(bool careful) const {
    int before = 0;  // tiles of the step before
    int number = 0;
    // A NaN among a row's scores shows in its results, whatever is chosen.
    if (team.weigher.has_row && std::isnan(whole[team.weigher.row].sum)) team.weigher.sum = NAN;
    load_scores(team.first_tile(), 0);
    ptx::cp_async_commit();  // of nothing, in the place of a V before the first
    for (int index = team.first_tile(); index < team.part.tiles.end; ++number) {
      const int tiles = count(index), next = index + kChoiceTiles * team.step();
      ptx::cp_async_wait<1>();  // the V of the step before may still be on its way
      team.sync();
      const float shrunk = weigh(number, tiles, careful);
      team.sync();  // weights and codes are written
      load_scores(next, (number + 1) & 1);
      load_v(number, tiles, index);
      if (number > 0) {
        ptx::cp_async_wait<2>();  // this step's V and the next one's scores may still be on their way
        accumulate(number - 1, before);
      }
      // What is added up so far is relative to the reference before this step.
      team.products.shrink(shrunk, team.weigher.lanes, team.p.teams.rows, team.lane);
      before = tiles;
      index = next;
    }
    ptx::cp_async_wait<0>();
    if (number > 0) accumulate(number - 1, before);
  }
};

// What shares are computed from, of a row's stats over all keys: 2^(exponent * (score - reference)) / sum.
__device__ __forceinline__ RowStats shifted(const RowStats& row, float exponent) {
  return {row.sum == 0 ? 0.0f : -fmaf(row.reference, exponent, log2f(row.sum)), row.sum};
}

// Stats of a CTA's rows over its teams, after those of every warp's, to the workspace, and those of all CTAs of its
// unit from there to shared memory, shifted().
template <typename C>
__device__ __forceinline__ void write_stats(const Team<C>& team, std::uint8_t* shared) {
  __syncthreads();  // stats are there
  const auto row = static_cast<int>(threadIdx.x);
  const std::int64_t first = (static_cast<std::int64_t>(team.part.unit) * team.p.splits.value + team.part.split);
  if (row >= team.p.rows) return;
  const CtaResults<C> results{team.p, team.part, team.layout, shared};
  team.p.together.stats[first * team.p.rows + row] = results.join_stats(row);
}
template <typename C>
__device__ __forceinline__ const RowStats* read_stats(const Team<C>& team, std::uint8_t* shared) {
  const Params& p = team.p;
  auto* whole = reinterpret_cast<RowStats*>(shared + team.layout.whole);
  for (int row = team.warp; row < p.rows; row += p.teams.cta_warps()) {
    const RowStats* first =
        p.together.stats + static_cast<std::int64_t>(team.part.unit) * p.splits.value * p.rows + row;
    const RowStats joined = join_parts(p.splits.value, team.lane, p.scales.exponent, false,
                                       [&](int i) { return first[static_cast<std::int64_t>(i) * p.rows]; });
    if (team.lane == 0) whole[row] = shifted(joined, p.scales.exponent);
  }
  __syncthreads();  // every row's reference and sum are there
  return whole;
}

template <typename C>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) score_kernel(const __grid_constant__ Params p) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  ptx::start_next_kernel();  // the choice kernel, which waits for the end of this one
  touch_parameters(p, shared);
  const Part part = Part::of_cta<C>(p);
  Team<C> team(p, part, shared);
  ptx::wait_for_kernels_before();  // inputs are written
  team.load_q();
  begin_keys(team);
  ptx::cp_async_wait<2>();  // K may still be on its way
  __syncthreads();          // Q is there
  RegisterRows<C> rows(team);
  write_scores(team, rows, [&](int, int index) { return workspace_scores<C>(p, part.unit, index); });
  rows.deposit_stats(stats_of_warp(team, shared));
  write_stats(team, shared);
}

template <typename C>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) choice_kernel(const __grid_constant__ Params p) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  ptx::start_next_kernel();  // the merge kernel
  touch_parameters(p, shared);
  const Part part = Part::of_cta<C>(p);
  const Mail<C> mail{p, part, shared};
  mail.open();
  Team<C> team(p, part, shared);
  ptx::wait_for_kernels_before();  // scores and stats are written
  begin_arrivals(p, part);
  team.clear_weights();
  const RowStats* whole = read_stats(team, shared);
  Chooser<C>(team, whole).walk();
  team.weigher.deposit_stats(stats_of_warp(team, shared));
  mail.wait();
  finish(team, mail, shared);
}

}  // namespace dspattn::cuda::decode
