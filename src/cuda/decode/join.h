// After the last tile: the results of a CTA's teams are joined in its shared memory. A cluster's CTAs send theirs to
// each other, so that each joins some of the columns. Where CTAs are no cluster they leave partial results in the
// workspace, which the last of the unit joins, or the merge kernel. All sums are added in a fixed order.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decode/results.h"
#include "cuda/decode/team.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/tagged.h"

namespace dspattn::cuda::decode {

// What the CTAs of a cluster send each other (config.h): `told` before a choice, `sent` in the end.
template <typename C>
struct Mail {
  static constexpr int kChunks = C::kHeadDim / 4;  // of four columns, of a row
  const Params& p;
  const Part& part;
  std::uint8_t* shared;

  __device__ __forceinline__ int cta() const { return p.cluster.remainder(part.split); }
  __device__ __forceinline__ std::uint32_t arrived(int which) const {
    return ptx::shared_address(shared + p.layout.arrived) + 8 * static_cast<std::uint32_t>(which);
  }
  // Row `row` of warp `warp` of those of the whole cluster.
  __device__ __forceinline__ ToldStats* told(int warp, int row) const {
    return reinterpret_cast<ToldStats*>(shared + p.layout.told) + warp * p.teams.rows + row;
  }
  // By CTA `from`: stats of every row, then its results of this CTA's chunks.
  __device__ __forceinline__ std::uint8_t* sent(int from) const {
    return shared + p.layout.sent + from * (p.teams.warps * p.teams.rows * kStatsBytes + 16 * p.layout.chunks);
  }
  __device__ __forceinline__ RowStats* sent_stats(int from, int row) const {
    return reinterpret_cast<RowStats*>(sent(from)) + row;
  }
  __device__ __forceinline__ float4* sent_chunk(int from, int number) const {
    return reinterpret_cast<float4*>(sent(from) + p.teams.warps * p.teams.rows * kStatsBytes) + number;
  }
  // Chunks that this CTA joins: begin_chunk() ... end_chunk() - 1 of all rows'.
  __device__ __forceinline__ int begin_chunk() const { return cta() * p.layout.chunks; }
  __device__ __forceinline__ int end_chunk() const { return min(begin_chunk() + p.layout.chunks, part.rows * kChunks); }

  // By all threads, before anything else: nobody sends before wait().
  __device__ __forceinline__ void open() const {
    if (p.cluster.value == 1) return;
    if (threadIdx.x == 0) {
      if (p.teams.stay != 0) {
        ptx::expect_from_cluster(arrived(0), p.cluster.value * p.teams.count * p.teams.rows * kToldBytes);
      }
      const int chunks = max(end_chunk() - begin_chunk(), 0);
      ptx::expect_from_cluster(arrived(1), p.cluster.value * (part.rows * kStatsBytes + chunks * 16));
    }
    ptx::cluster_arrive();
  }
  __device__ __forceinline__ void wait() const {
    if (p.cluster.value > 1) ptx::cluster_wait();
  }
};

// Results in fp32 and stats of a CTA, and of the others of its cluster. A thread has four columns of a row.
template <typename C>
struct CtaResults {
  static constexpr int kChunks = Mail<C>::kChunks;
  static constexpr int kAtOnce = 4;  // parts
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

  struct Joined {
    RowStats stats{-INFINITY, 0};
    float4 x = make_float4(0, 0, 0, 0);
  };
  // Joins `count` parts of a row, of which stats_at(i) and value_at(i) are part i.
  template <typename StatsAt, typename ValueAt>
  __device__ __forceinline__ Joined join(int count, StatsAt stats_at, ValueAt value_at) const {
    Joined joined;
#pragma unroll 1
    for (int base = 0; base < count; base += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        joined.stats.reference = fmaxf(joined.stats.reference, stats_at(min(base + i, count - 1)).reference);
      }
    }
#pragma unroll 1
    for (int base = 0; base < count; base += kAtOnce) {
      RowStats parts[kAtOnce];
      float4 values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        parts[i] = stats_at(min(base + i, count - 1));
        values[i] = value_at(min(base + i, count - 1));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + i >= count) parts[i].sum = parts[i].rest = 0;
        const float factor = part_factor(parts[i], joined.stats.reference, p.scales.exponent);
        joined.stats.sum = fmaf(parts[i].sum, factor, joined.stats.sum);
        joined.stats.rest = fmaf(parts[i].rest, factor, joined.stats.rest);
        add(joined.x, factor, values[i]);
      }
    }
    return joined;
  }
  // Over the teams.
  __device__ __forceinline__ Joined join_teams(int row, int column) const {
    const int first = row / kWarpRows;  // the first team's warp
    return join(
        p.teams.count, [&](int i) { return stats(first + i * p.teams.warps, row); },
        [&](int i) { return *reinterpret_cast<const float4*>(out(first + i * p.teams.warps, row) + column); });
  }
  __device__ __forceinline__ RowStats join_stats(int row) const {
    const int first = row / kWarpRows;
    return join(
               p.teams.count, [&](int i) { return stats(first + i * p.teams.warps, row); },
               [](int) { return make_float4(0, 0, 0, 0); })
        .stats;
  }

  // Calls visit(row, column) for four columns of a row, all chunks [begin, end), a thread each.
  template <typename Visit>
  __device__ __forceinline__ void each_chunk(int begin, int end, Visit visit) const {
    for (int item = begin + static_cast<int>(threadIdx.x); item < end; item += 32 * p.teams.cta_warps()) {
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
    if (p.partials.out == nullptr) return store_final(row, column, x, row_stats);
    const std::int64_t at = partial(p.cluster.quotient(part.split), row);
    if (column < p.partials.stride) {
      *reinterpret_cast<float4*>(p.partials.out + at * p.partials.stride + column) = x;
    }
    if (column == 0) p.partials.stats[at] = row_stats;
  }
  // A row of partial results of the unit, by its cluster `which`.
  __device__ __forceinline__ std::int64_t partial(int which, int row) const {
    const int parts = p.cluster.quotient(p.splits.value);
    return (static_cast<std::int64_t>(part.unit) * parts + which) * p.rows + row;
  }
  __device__ __forceinline__ void store_final(int row, int column, float4 x, const RowStats& row_stats) const {
    const int columns = p.results.out.columns;
    const tile::PackedRow which = part.packed_row(p, row);
    const int head = part.kv_head * p.heads_per_kv_head + which.head;
    const float factor = normaliser(row_stats.sum);
    if constexpr (C::kSumsPruned) {
      add_rest(p, part.batch, part.kv_head, tile::interval_of(part.band, which.query), row_stats, column,
               min(columns - column, 4), x);
    }
    store_results(p.results, C::kType, p.results.out.offset(part.batch, head, which.query) + column,
                  make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w), columns - column);
    if (column == 0) {
      store_lse(p.results, p.results.lse.offset(part.batch, head, which.query), row_stats, p.scales.exponent);
    }
  }

  // Where the CTA is alone.
  __device__ __forceinline__ void store_teams() const {
    each_chunk(0, part.rows * kChunks, [&](int row, int column) {
      const Joined joined = join_teams(row, column);
      store(row, column, joined.x, joined.stats);
    });
  }

  // Joins the unit's partial results, of which kAtOnce are on their way together.
  template <int kPartsAtOnce>
  __device__ __forceinline__ Joined join_partials(int row, int column) const {
    Joined joined;
    const int parts = p.splits.value;
    // Few instructions: this code is new to the multiprocessor.
    const std::int64_t first = partial(0, row);
    const RowStats* first_stats = p.partials.stats + first;
    const float* first_values = p.partials.out + first * p.partials.stride + column;
    const int step = p.rows * p.partials.stride;
#pragma unroll 1
    for (int base = 0; base < parts; base += kPartsAtOnce) {
      RowStats stats_of[kPartsAtOnce];
      float4 values[kPartsAtOnce];
      float largest = joined.stats.reference;
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const int which = min(base + i, parts - 1);
        stats_of[i] = first_stats[which * p.rows];
        values[i] = *reinterpret_cast<const float4*>(first_values + which * step);
      }
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) largest = fmaxf(largest, stats_of[i].reference);
      const float before = part_factor(joined.stats, largest, p.scales.exponent);
      joined.stats = {largest, joined.stats.sum * before, joined.stats.rest * before};
      joined.x = make_float4(joined.x.x * before, joined.x.y * before, joined.x.z * before, joined.x.w * before);
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        if (base + i >= parts) stats_of[i].sum = stats_of[i].rest = 0;
        const float factor = part_factor(stats_of[i], largest, p.scales.exponent);
        joined.stats.sum = fmaf(stats_of[i].sum, factor, joined.stats.sum);
        joined.stats.rest = fmaf(stats_of[i].rest, factor, joined.stats.rest);
        add(joined.x, factor, values[i]);
      }
    }
    return joined;
  }

  // After this CTA has left its part's results: the last of the unit's CTAs joins all, and leaves nothing in the
  // workspace that bears the tag, which the same launch will have when a graph is replayed.
  __device__ __forceinline__ void join_last() const {
    std::uint64_t* counter = p.arrivals.counters + part.unit;
    auto* is_last = reinterpret_cast<unsigned*>(shared + layout.touched);
    __syncthreads();  // results are written
    if (threadIdx.x == 0) *is_last = ptx::arrive_at(counter) + 1 == static_cast<unsigned>(p.splits.value) ? 1u : 0u;
    __syncthreads();  // and so are the others', where it is the last
    if (*is_last == 0) return;
    constexpr int kFew = 4, kMany = 16;
    each_chunk(0, part.rows * kChunks, [&](int row, int column) {
      if (column >= p.partials.stride) return;
      const Joined joined =
          p.splits.value <= kFew ? join_partials<kFew>(row, column) : join_partials<kMany>(row, column);
      store_final(row, column, joined.x, joined.stats);
    });
    if (threadIdx.x == 0) *counter = 0;
    if (p.together.told == nullptr) return;
    const int entries = p.splits.value * p.teams.rows;
    for (int i = static_cast<int>(threadIdx.x); i < entries; i += 32 * p.teams.cta_warps()) {
      ptx::store_tagged(p.together.told + (std::int64_t{part.unit} * entries + i) * kTaggedBytes, make_float2(0, 0), 0);
    }
  }

  // Sends the teams' rows to the cluster's CTAs.
  __device__ __forceinline__ void send(const Mail<C>& mail) const {
    const int own = mail.cta();
    each_chunk(0, part.rows * kChunks, [&](int row, int column) {
      const int chunk = row * kChunks + column / 4;
      const int to = p.chunks.quotient(chunk);
      ptx::send_16(ptx::shared_address(mail.sent_chunk(own, chunk - to * layout.chunks)), join_teams(row, column).x,
                   mail.arrived(1), static_cast<std::uint32_t>(to));
    });
    // From the last thread on: the first have chunks.
    const int threads = 32 * p.teams.cta_warps();
    for (int item = threads - 1 - static_cast<int>(threadIdx.x); item < part.rows * p.cluster.value; item += threads) {
      const int row = p.cluster.quotient(item);
      const RowStats joined = join_stats(row);
      ptx::send_16(ptx::shared_address(mail.sent_stats(own, row)),
                   make_float4(joined.reference, joined.sum, joined.rest, 0.0f), mail.arrived(1),
                   static_cast<std::uint32_t>(item - row * p.cluster.value));
    }
  }

  // Joins what the cluster's CTAs have sent.
  __device__ __forceinline__ void store_sent(const Mail<C>& mail) const {
    const int begin = mail.begin_chunk();
    each_chunk(begin, mail.end_chunk(), [&](int row, int column) {
      const int number = row * kChunks + column / 4 - begin;
      const Joined joined = join(
          p.cluster.value, [&](int cta) { return *mail.sent_stats(cta, row); },
          [&](int cta) { return *mail.sent_chunk(cta, number); });
      store(row, column, joined.x, joined.stats);
    });
  }
};

// Before a CTA's first arrival, while its first loads are on their way.
__device__ __forceinline__ void begin_arrivals(const Params& p, const Part& part) {
  if (p.arrivals.counters != nullptr && threadIdx.x == 0) {
    ptx::open_counter(p.arrivals.counters + part.unit, p.arrivals.tag);
  }
}

// Where the stats of a warp's rows are left for the CTA to join.
template <typename C>
__device__ __forceinline__ RowStats* stats_of_warp(const Team<C>& team, std::uint8_t* shared) {
  return reinterpret_cast<RowStats*>(shared + team.layout.stats) + team.warp * kWarpRows;
}

// Joins the teams' results and writes them, after the stats of every warp's rows.
template <typename C>
__device__ __forceinline__ void finish(Team<C>& team, const Mail<C>& mail, std::uint8_t* shared) {
  __syncthreads();  // everything has been read: results go over it
  team.products.deposit(reinterpret_cast<float*>(shared + team.warp * team.layout.out_bytes), team.rows, team.lane);
  const CtaResults<C> results{team.p, team.part, team.layout, shared};
  __syncthreads();  // results and stats are there
  if (team.p.cluster.value == 1) {
    results.store_teams();
    if (team.p.arrivals.counters != nullptr) results.join_last();
    return;
  }
  results.send(mail);
  ptx::await_from_cluster(mail.arrived(1));
  results.store_sent(mail);
}

}  // namespace dspattn::cuda::decode
