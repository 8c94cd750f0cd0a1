// What a CTA works on, and a team of its warps: where everything lies, and loads.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/decode/load_other.h"
#include "cuda/decode/products16.h"
#include "cuda/decode/products32.h"
#include "cuda/decode/weigh.h"

namespace dspattn::cuda::decode {

template <typename C>
using Products = std::conditional_t<C::kType == DType::f32, Products32<C>, Products16<C>>;

template <typename C>
struct Team {
  const Params& p;
  const Part& part;
  std::uint8_t* const shared;
  const SharedLayout& layout;
  const int lane, warp, team;
  const int thread, threads;  // of the team
  const int first_row, rows;  // of this warp
  const WarpTiles tiles;
  const std::uint32_t q, ring;  // shared memory
  const Bits<C>* k;             // global memory: key 0, or page 0
  const Bits<C>* v;
  Weigher<C> weigher;
  Products<C> products;

  __device__ __forceinline__ Team(const Params& params, const Part& own_part, std::uint8_t* shared_memory)
      : p(params),
        part(own_part),
        shared(shared_memory),
        layout(params.layout),
        lane(static_cast<int>(threadIdx.x) & 31),
        warp(static_cast<int>(threadIdx.x) >> 5),
        team(warp >> params.team_shift),
        thread(static_cast<int>(threadIdx.x) - team * params.teams.warps * 32),
        threads(params.teams.warps * 32),
        first_row((warp - team * params.teams.warps) * kWarpRows),
        rows(min(params.teams.rows, own_part.rows - first_row)),
        tiles(layout, shared, warp),
        q(ptx::shared_address(shared)),
        ring(q + static_cast<std::uint32_t>(layout.ring + team * layout.ring_bytes)),
        k(static_cast<const Bits<C>*>(params.k.data) +
          params.k.offset(params.pages.table != nullptr ? 0 : own_part.batch, own_part.kv_head, 0)),
        v(static_cast<const Bits<C>*>(params.v.data) +
          params.v.offset(params.pages.table != nullptr ? 0 : own_part.batch, own_part.kv_head, 0)),
        weigher(params, layout, tiles, own_part, first_row, lane) {}

  // With another buffer of weights and codes.
  __device__ __forceinline__ WarpTiles tiles_of(int buffer) const { return {layout, shared, warp, buffer}; }

  // Makes what the team's threads wrote visible to all of them.
  __device__ __forceinline__ void sync() const {
    if (threads == 32) {
      __syncwarp();
    } else {
      ptx::named_barrier_sync(1 + team, threads);
    }
  }

  // The part's rows, for all teams, by all of the CTA's threads, and zeros in the others' places. From row `period` on,
  // a power of two, they repeat.
  __device__ __forceinline__ void load_q(int period = kMaxRows) const {
    const auto* data = static_cast<const Bits<C>*>(p.q.data);
    copy_rows<C>(q, p.teams.warps * kWarpRows, p.teams.warps * kWarpRows, p.d, p.vector_q,
                 static_cast<int>(threadIdx.x), 32 * p.teams.cta_warps(), data, [&](int any_row) -> const Bits<C>* {
                   const int row = any_row & (period - 1);
                   if (row >= part.rows) return nullptr;
                   const tile::PackedRow which = part.packed_row(p, row);
                   return data + p.q.offset(part.batch, part.kv_head * p.heads_per_kv_head + which.head, which.query);
                 });
    ptx::cp_async_commit();
  }

  // What products read of rows that there are not: no weight, and codes that are valid.
  __device__ __forceinline__ void clear_weights() const {
    if (part.rows == p.teams.rows * p.teams.warps) return;
    constexpr std::uint32_t kFirstTwo = 0x04040404u;  // elements 0 and 1 of four groups
    const int warps = p.teams.cta_warps();
    const int end = layout.codes + warps * layout.buffers * layout.codes_bytes;
    for (int at = layout.weights + 4 * static_cast<int>(threadIdx.x); at < end; at += 4 * 32 * warps) {
      *reinterpret_cast<std::uint32_t*>(shared + at) = at < layout.codes ? 0 : kFirstTwo;
    }
  }

  // Asks for a tile, which is a group of copies; of one at or past the team's end for nothing. Row 4 u + e of it is
  // element e of group u.
  __device__ __forceinline__ void load_k(int index, std::uint32_t to) const {
    if (index < part.tiles.end) load_tile(to, k, p.k, p.k_row_bytes, p.d, 0, index);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void load_v(int index, std::uint32_t to) const {
    if (index < part.tiles.end) copy_v(index, to);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void copy_v(int index, std::uint32_t to) const {
    load_tile(to, v, p.v, p.v_row_bytes, p.results.out.columns, 1, index);
  }
  // Asks for the kept rows of V; `kept`: codes of the team's first row. A team is one warp.
  __device__ __forceinline__ void gather_v(int index, std::uint32_t to, const std::uint8_t* kept) const {
    if (!gathers_plainly()) return gather_other(index, to, kept);
    gather_plain(index, to, [&](int i) { return std::uint32_t{kept[2 * i + (lane >> 4)]}; });
  }
  __device__ __forceinline__ bool gathers_plainly() const { return p.v_row_bytes != 0 && p.runs != 0; }
  __device__ __forceinline__ void gather_other(int index, std::uint32_t to, const std::uint8_t* kept) const {
    copy_other_tile<C>(p, 1, part.batch, part.kv_head, part.begin, part.end, index, to, kept, thread, threads);
  }
  // code_at(i): of group 2 i + lane / 16.
  template <typename CodeAt>
  __device__ __forceinline__ void gather_plain(int index, std::uint32_t to, CodeAt code_at) const {
    const PlainCopies<C> copies(p.v_row_bytes, p.results.out.columns, lane);
    if (p.pages.table == nullptr) {
      copies.copy_kept(to, run_of(v, p.v, index, 0) + 16 * (lane & 7), p.keys.group_step, elements_of(p.keys), code_at,
                       lane);
    } else {
      copies.copy_kept_of_runs(to, run_of(v, p.v, index, lane & 3), p.keys.group_step, code_at, lane);
    }
  }

  // By codes of groups 4 q + t in byte q of lane t: group 2 i + lane / 16 is group 2 (i % 2) + lane / 16 of quad i / 2.
  __device__ __forceinline__ void gather_of_lanes(int index, std::uint32_t to, std::uint32_t codes) const {
    const std::uint32_t even = __shfl_sync(~0u, codes, lane >> 4);
    const std::uint32_t odd = __shfl_sync(~0u, codes, 2 + (lane >> 4));
    gather_plain(index, to, [&](int i) { return (i % 2 == 0 ? even : odd) >> (8 * (i / 2)); });
  }
  // The same where keys lie in one piece and none is hidden.
  __device__ __forceinline__ void gather_seen(int index, std::uint32_t to, std::uint32_t codes) const {
    const int shift = 2 * (lane >> 3 & 1);  // to this lane's of a group's two keys
    const std::uint32_t even = __shfl_sync(~0u, codes, lane >> 4) >> shift;
    const std::uint32_t odd = __shfl_sync(~0u, codes, 2 + (lane >> 4)) >> shift;
    PlainCopies<C>(p.v_row_bytes, p.results.out.columns, lane)
        .copy_seen(
            to, run_of(v, p.v, index, 0) + 16 * (lane & 7), p.keys.group_step, elements_of(p.keys),
            [&](int i) { return (i % 2 == 0 ? even : odd) >> (8 * (i / 2)); }, lane);
  }

  // All rows of a tile. A thread always has the same element of its groups.
  __device__ __forceinline__ void load_tile(std::uint32_t to, const Bits<C>* base, const blocks::RowsView& view,
                                            std::uint32_t row_bytes, int columns, int of_v, int index) const {
    const int block = block_of<C>(index);
    if (row_bytes != 0 && p.runs != 0 && block >= part.begin && block + tile::kBlockKeys <= part.end) {
      const std::uint8_t* run = run_of(base, view, index, thread >> 3 & 3);
      PlainCopies<C>(row_bytes, run == nullptr ? 0 : columns, thread)
          .copy_tile(to, run + 16 * (thread & 7), p.keys.group_step, thread, p.teams.warps);
    } else {
      copy_other_tile<C>(p, of_v, part.batch, part.kv_head, part.begin, part.end, index, to, nullptr, thread, threads);
    }
  }

  // Where an element of a tile's group 0 lies: the run of that element of all groups begins there. Null: in no page.
  __device__ __forceinline__ const std::uint8_t* run_of(const Bits<C>* base, const blocks::RowsView& view, int index,
                                                        int element) const {
    return address_of_key<C>(p, base, view, part.batch, block_of<C>(index) + p.keys.key(part_of<C>(index), 0, element));
  }

  // Scores of a K tile; then it may be overwritten.
  __device__ __forceinline__ void score(std::uint32_t k_tile) const {
    products.score(q, p.teams.warps * kWarpRows, first_row, k_tile, tiles, layout.scores_stride, rows, lane);
    sync();  // K is read, by all warps, and this one's scores are written
  }

  __device__ __forceinline__ void accumulate_whole(const WarpTiles& warp_tiles, std::uint32_t v_tile) {
    products.accumulate_whole(warp_tiles, v_tile, layout.weights_stride, p.teams.rows, lane);
  }
  __device__ __forceinline__ void accumulate_gathered(const WarpTiles& warp_tiles, std::uint32_t v_tile) {
    products.accumulate_gathered(warp_tiles, v_tile, layout.weights_stride, p.teams.rows, lane);
  }

  // The team's tiles are every so many from its first on.
  __device__ __forceinline__ int step() const { return p.teams.count; }
  __device__ __forceinline__ int first_tile() const { return part.tiles.begin + team; }

  // A place of the ring, of the size of a K tile.
  __device__ __forceinline__ std::uint32_t place(int number) const {
    return ring + static_cast<std::uint32_t>(number * layout.tile_bytes);
  }
};

}  // namespace dspattn::cuda::decode
