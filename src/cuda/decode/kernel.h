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
#include <type_traits>

#include "cuda/decode/load.h"
#include "cuda/decode/products16.h"
#include "cuda/decode/products32.h"
#include "cuda/decode/results.h"
#include "cuda/decode/weigh.h"

namespace dspattn::cuda::decode {

template <typename C>
using Products = std::conditional_t<C::kType == DType::f32, Products32<C>, Products16<C>>;

// What a CTA works on: a part of the keys of a unit, which is a (sequence, key head).
struct Part {
  int unit, split;
  int batch, kv_head;
  tile::RowBand band;
  tile::TileRange tiles;
  int begin, end;  // keys that some row sees lie in here

  template <typename C>
  __device__ __forceinline__ static Part of_cta(const Params& p) {
    Part part;
    part.unit = p.splits.quotient(static_cast<int>(blockIdx.x));
    part.split = static_cast<int>(blockIdx.x) - part.unit * p.splits.value;
    part.batch = p.kv_heads.quotient(part.unit);
    part.kv_head = part.unit - part.batch * p.kv_heads.value;
    part.band = {p.left, p.right, p.diagonal, tile::visible_keys(p.key_lengths, part.batch, p.n_k)};
    part.begin = part.band.begin(0);
    part.end = part.band.end(p.n_q - 1);
    const tile::KeyBlockRange blocks = tile::visible_key_blocks(part.band, 0, p.n_q - 1);
    part.tiles = tile::part_of_range({blocks.begin * C::kTilesPerBlock, blocks.end * C::kTilesPerBlock}, part.split,
                                     p.splits.value);
    return part;
  }
};

template <typename C>
struct Team {
  const Params& p;
  const Part& part;
  const SharedLayout layout;
  const int lane, warp, team;
  const int thread, threads;  // of the team
  const int first_row, rows;  // of this warp
  const WarpTiles tiles;
  const std::uint8_t* kept;     // codes of the team's first row: what of V is gathered
  const std::uint32_t q, ring;  // shared memory
  const Bits<C>* k;             // global memory: key 0
  const Bits<C>* v;
  Weigher<C> weigher;
  Products<C> products;

  __device__ __forceinline__ Team(const Params& params, const Part& of, std::uint8_t* shared)
      : p(params),
        part(of),
        layout(shared_layout(C::kType, C::kHeadDim, params.teams)),
        lane(static_cast<int>(threadIdx.x) & 31),
        warp(static_cast<int>(threadIdx.x) >> 5),
        team(warp / params.teams.warps),
        thread(static_cast<int>(threadIdx.x) - team * params.teams.warps * 32),
        threads(params.teams.warps * 32),
        first_row((warp - team * params.teams.warps) * kWarpRows),
        rows(min(params.teams.rows, params.rows - first_row)),
        tiles(layout, shared, warp),
        kept(WarpTiles(layout, shared, team * params.teams.warps).codes),
        q(ptx::shared_address(shared)),
        ring(q + static_cast<std::uint32_t>(layout.ring + team * layout.ring_bytes)),
        k(static_cast<const Bits<C>*>(params.k.data) + params.k.offset(of.batch, of.kv_head, 0)),
        v(static_cast<const Bits<C>*>(params.v.data) + params.v.offset(of.batch, of.kv_head, 0)),
        weigher(params, layout, tiles, of.band, first_row, of.batch, of.kv_head, lane) {}

  // Makes what the team's threads wrote visible to all of them.
  __device__ __forceinline__ void sync() const {
    if (threads == 32) {
      __syncwarp();
    } else if (team == 0) {  // numbers that the compiler knows: it reserves no others
      ptx::named_barrier_sync(1, threads);
    } else {
      ptx::named_barrier_sync(2, threads);
    }
  }

  __device__ __forceinline__ int block_of(int index) const { return index / C::kTilesPerBlock * tile::kBlockKeys; }
  __device__ __forceinline__ int part_of(int index) const { return index % C::kTilesPerBlock; }

  // Rows of the first team's tiles, by all of the CTA's threads. Also what products read of rows that there are not.
  __device__ __forceinline__ void load_q(std::uint8_t* shared) const {
    const auto* data = static_cast<const Bits<C>*>(p.q.data);
    copy_rows<C>(q, p.teams.warps * kWarpRows, p.d, p.vector_q, static_cast<int>(threadIdx.x), kThreads, data,
                 [&](int row) -> const Bits<C>* {
                   if (row >= p.rows) return nullptr;
                   const tile::PackedRow which = tile::packed_row(row, p.n_q);
                   return data + p.q.offset(part.batch, part.kv_head * p.heads_per_kv_head + which.head, which.query);
                 });
    ptx::cp_async_commit();
    constexpr std::uint32_t kFirstTwo = 0x04040404u;  // elements 0 and 1 of four groups
    for (int at = layout.weights + 4 * static_cast<int>(threadIdx.x); at < layout.stats; at += 4 * kThreads) {
      if (at < layout.codes + kWarps * layout.codes_bytes) {
        *reinterpret_cast<std::uint32_t*>(shared + at) = at < layout.codes ? 0 : kFirstTwo;
      }
    }
  }

  // Row 4 u + e of a tile is element e of group u. `index` at or past the team's end: nothing.
  __device__ __forceinline__ void load_k(int index, int buffer) const {
    if (index < part.tiles.end) {
      copy_rows<C>(k_tile(buffer), C::kTileK, p.d, p.vector_k, thread, threads, k,
                   [&](int row) { return row_of(k, p.k.row_stride, index, row >> 2, row & 3); });
    }
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void load_v(int index) const {
    const int columns = p.results.out.columns;
    if (p.teams.gather != 0) {
      copy_rows<C>(v_tile(), C::kTileK / 2, columns, p.vector_v, thread, threads, v, [&](int row) -> const Bits<C>* {
        const std::uint32_t code = kept[row >> 1];
        if (tile::kept_is_hidden(code, row & 1)) return nullptr;
        return row_of(v, p.v.row_stride, index, row >> 1, tile::kept_element(code, row & 1));
      });
    } else {
      copy_rows<C>(v_tile(), C::kTileK, columns, p.vector_v, thread, threads, v,
                   [&](int row) { return row_of(v, p.v.row_stride, index, row >> 2, row & 3); });
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void accumulate() {
    products.accumulate(tiles, v_tile(), p.teams.gather, layout.weights_stride, p.teams.rows, lane);
  }

  // The team's tiles are every so many from its first on.
  __device__ __forceinline__ int step() const { return kWarps / p.teams.warps; }
  __device__ __forceinline__ int first_tile() const { return part.tiles.begin + team; }

  // Asks for the first two K tiles.
  __device__ __forceinline__ void begin() const {
    load_k(first_tile(), 0);
    load_k(first_tile() + step(), 1);
  }

  // All of the team's tiles, after begin().
  __device__ __forceinline__ void walk() {
    int index = first_tile();
    if (index >= part.tiles.end) return;
    for (int number = 0; index < part.tiles.end; ++number, index += step()) {
      // Asked for after K(i): K(i + 1), and V(i - 1) but for the first tile.
      if (number == 0) {
        ptx::cp_async_wait<1>();
      } else {
        ptx::cp_async_wait<2>();
      }
      sync();
      products.score(q, p.teams.warps * kWarpRows, first_row, k_tile(number & 1), tiles, layout.scores_stride, rows,
                     lane);
      sync();  // K(i) is read, by all warps, and this one's scores are written
      load_k(index + 2 * step(), number & 1);
      if (number > 0) {
        ptx::cp_async_wait<1>();
        sync();
        accumulate();
      }
      __syncwarp();  // weights are read
      const float shrunk = weigher.weigh(block_of(index), part_of(index));
      products.shrink(shrunk, weigher.lanes, p.teams.rows, lane);
      sync();  // V(i - 1) is read, by all warps; weights and codes are written
      load_v(index);
    }
    ptx::cp_async_wait<0>();
    sync();
    accumulate();
  }

 private:
  __device__ __forceinline__ std::uint32_t k_tile(int buffer) const {
    return ring + static_cast<std::uint32_t>(buffer * layout.tile_bytes);
  }
  __device__ __forceinline__ std::uint32_t v_tile() const { return ring + 2 * layout.tile_bytes; }

  // Null: no row sees the key.
  __device__ __forceinline__ const Bits<C>* row_of(const Bits<C>* base, std::int64_t stride, int index, int group,
                                                   int element) const {
    const int key = block_of(index) + p.keys.key(part_of(index), group, element);
    return key >= part.begin && key < part.end ? base + key * stride : nullptr;
  }
};

// Joins the teams' rows, a warp a row, and writes the CTA's results.
template <typename C>
__device__ __forceinline__ void join_teams(const Params& p, const Part& part, const SharedLayout& layout,
                                           const std::uint8_t* shared) {
  const auto* stats = reinterpret_cast<const RowStats*>(shared + layout.stats);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int row = static_cast<int>(threadIdx.x) >> 5; row < p.rows; row += kWarps) {
    const int first = row / kWarpRows;  // the first team's warp
    const int in_warp = row % kWarpRows;
    RowStats joined{-INFINITY, 0};
    float factors[kWarps];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const int warp = first + i * p.teams.warps;
      if (warp < kWarps) joined.reference = fmaxf(joined.reference, stats[warp * kWarpRows + in_warp].reference);
    }
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const int warp = first + i * p.teams.warps;
      factors[i] = 0;
      if (warp >= kWarps) continue;
      const RowStats own = stats[warp * kWarpRows + in_warp];
      factors[i] = part_factor(own, joined.reference, p.scales.exponent);
      if (own.sum != 0) joined.sum += own.sum * factors[i];
    }
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

template <typename C>
__global__ void __launch_bounds__(kThreads, ctas_by_registers(C::kType, C::kHeadDim))
    decode_kernel(const __grid_constant__ Params p) {
  DSPATTN_ALIGNED_SHARED(std::uint8_t, shared, 1024);
  ptx::start_next_kernel();  // the merge kernel, which waits for the end of this one
  const Part part = Part::of_cta<C>(p);
  Team<C> team(p, part, shared);
  team.load_q(shared);
  team.begin();
  ptx::cp_async_wait<2>();  // K may still be on its way
  __syncthreads();          // Q is there
  team.walk();
  const float sum = team.weigher.total();
  __syncthreads();  // everything has been read: results go over it
  team.products.deposit(reinterpret_cast<float*>(shared + team.warp * team.layout.out_bytes), team.lane);
  if (team.weigher.first_group == 0) {
    auto* stats = reinterpret_cast<RowStats*>(shared + team.layout.stats) + team.warp * kWarpRows;
    stats[team.lane / team.weigher.lanes] = {team.weigher.reference, sum};
  }
  __syncthreads();  // results and stats are there
  join_teams<C>(p, part, team.layout, shared);
}

}  // namespace dspattn::cuda::decode
