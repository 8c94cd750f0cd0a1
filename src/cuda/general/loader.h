// What a CTA of the general forward copies to shared memory, and where it lies there.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/general/copy.h"
#include "cuda/general/item.h"
#include "cuda/general/params.h"

namespace dspattn::cuda::general {

// Q's tile, and the stages of K's and V's.
template <typename C>
struct Loader {
  using PlaceQ = Swizzled<C::kWarpRows>;
  using PlaceK = Swizzled<C::kTileK>;
  using PlaceV = std::conditional_t<C::kIsFp32, PlainRows<C::kVRowBytes>, Swizzled<C::kTileK>>;

  const ForwardParams& params;
  Own<C>& own;
  std::uint32_t shared;     // Q, then K and V of one stage after the other
  NextTile next_k, next_v;  // kKeepsAddresses: of the thread
  int cheap_next;           // the same: 1: the next tile is copied cheaply

  __device__ __forceinline__ Loader(const ForwardParams& p, Own<C>& o, std::uint32_t address)
      : params(p), own(o), shared(address) {}

  __device__ __forceinline__ ItemOf<C>& item() const { return own.items[0]; }
  __device__ __forceinline__ ItemOf<C>& next_item() const { return own.items[C::kItemSlots - 1]; }

  __device__ __forceinline__ static std::uint32_t q_bytes() {
    return static_cast<std::uint32_t>(threads<C>() / 32 * C::kWarpQBytes);
  }
  __device__ __forceinline__ std::uint32_t k_tile(int stage) const {
    return shared + q_bytes() + static_cast<std::uint32_t>(stage * (C::kKBytes + C::kVBytes));
  }
  __device__ __forceinline__ std::uint32_t v_tile(int stage) const {
    return k_tile(stage) + (takes_turns() ? 0 : C::kKBytes);
  }
  // kSharesOutput: where weights are exchanged.
  __device__ __forceinline__ std::uint32_t exchange_place() const { return k_tile(params.stages); }
  // Where K and V of a tile are.
  __device__ __forceinline__ int stage_of(int tile, int ahead) const {
    return ahead == 0 ? 0 : (tile + item().phase) & 1;
  }
  // K and V in one place.
  __device__ __forceinline__ bool takes_turns() const { return C::kLeastStages == 0 && params.stages == 0; }

  // Of the warp's rows.
  __device__ __forceinline__ std::uint32_t warp_q() const {
    return shared + static_cast<std::uint32_t>((own_thread() >> 5) * C::kWarpQBytes);
  }
  __device__ __forceinline__ void load_q(const ItemOf<C>& item) const {
    const Source source{item.q, params.q.row_stride * C::kElementBytes, item.rows - item.row_begin, params.d,
                        params.vector_q};
    const int first_row = (own_thread() >> 5) * C::kWarpRows;
    if constexpr (!C::kAll) return copy_warp_rows<C, PlaceQ>(warp_q(), source, first_row);
    const std::int64_t head_bytes = params.q.head_stride * C::kElementBytes;
    copy_rows_at<C, PlaceQ, WarpRows<C>>(warp_q(), source, [&](int row) -> RowAt {
      const int position = item.group.position(first_row + row);
      return {position < source.rows && item.group.exists(first_row + row),
              position * source.row_bytes + item.group.head(first_row + row) * head_bytes};
    });
  }
  // Heads in parts: Q of the next one in place of the other's.
  __device__ __forceinline__ void load_part(int part) {
    __syncthreads();  // all have left it
    if (threadIdx.x == 0) {
      const int heads = (part - item().part) * tile::kMostGroupRows;
      item().q += heads * params.q.head_stride * C::kElementBytes;
      item().head += heads;
      item().group = params.group.part(part);
      item().part = part;
    }
    __syncthreads();  // all can read it
    load_q(item());
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    finish_q();
    __syncthreads();
  }
  // One tile after the other.
  __device__ __forceinline__ void load_k(const ItemOf<C>& item, int tile, int stage) {
    const tile::KeyTiles& tiles = params.tiles;
    if constexpr (C::kCheapCopies) {
      if (tile < item.cheap_end) return copy_next_k(tile, stage);
    }
    copy_tile<C, PlaceK>(k_tile(stage), k_source(item), tiles, tiles.first_key(tile), tiles.part(tile), key_of_k());
  }
  __device__ __forceinline__ void load_v(const ItemOf<C>& item, int tile, int stage) {
    const tile::KeyTiles& tiles = params.tiles;
    if constexpr (C::kCheapCopies) {
      if (tile < item.cheap_end) return copy_next_v(tile, stage);
    }
    copy_tile<OfV<C>, PlaceV>(v_tile(stage), v_source(item), tiles, tiles.first_key(tile), tiles.part(tile),
                              key_of_v());
  }

  // What this thread has copied has arrived: Q times 2^-e, or everything rounded to tf32. The barrier that follows
  // shows it to the others.
  __device__ __forceinline__ void finish_q() const {
    each_own_chunk<C, PlaceQ, WarpRows<C>>([&](std::uint32_t at) {
      if constexpr (C::kIsTf32) {
        round_chunk(warp_q() + at);
      } else if constexpr (!C::kIsFp32) {
        scale_chunk<C>(warp_q() + at, params.scales.q_scale);
      }
    });
  }
  __device__ __forceinline__ void finish_k(int stage) const {
    if constexpr (C::kIsTf32 && !C::kRoundsFragments) {
      each_own_chunk<C, PlaceK, SharedRows<C>>([&](std::uint32_t at) { round_chunk(k_tile(stage) + at); });
    }
  }
  __device__ __forceinline__ void finish_v(int stage) const {
    if constexpr (C::kIsTf32 && !C::kRoundsFragments) {
      each_own_chunk<OfV<C>, PlaceV, SharedRows<C>>([&](std::uint32_t at) { round_chunk(v_tile(stage) + at); });
    }
  }

  // Before an item's first tile: Q is there, as far as this thread has copied it, and K (two stages: and V) is asked
  // for.
  __device__ __forceinline__ void begin(int ahead) {
    if (C::kTakesItems && item().asked != 0) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
    } else {
      load_q(item());
      ptx::cp_async_commit();
      load_first(item(), ahead, 0);
      ptx::cp_async_commit();
      ptx::cp_async_wait<1>();
    }
    finish_q();
  }
  // An item's first tile of K, two stages: and of V.
  __device__ __forceinline__ void load_first(const ItemOf<C>& loaded, int ahead, int to_stage) {
    begin_tiles(loaded);
    load_k(loaded, loaded.tiles.begin, to_stage);
    if (ahead != 0) load_v(loaded, loaded.tiles.begin, to_stage);
  }
  __device__ __forceinline__ void begin_tiles(const ItemOf<C>& loaded) {
    if constexpr (C::kCheapCopies) {
      own_next_k() = NextTile::of<C>(k_source(loaded), params.tiles, loaded.tiles.begin, key_of_k());
      own_next_v() = NextTile::of<OfV<C>>(v_source(loaded), params.tiles, loaded.tiles.begin, key_of_v());
    }
  }
  // Before tile `tile`: its K (two stages: and V) is there for all, and all have left the stage before,
  // into which the next tile comes.
  __device__ __forceinline__ void await_stage(int tile, int stage, int ahead) {
    if constexpr (C::kKeepsAddresses) {  // asked for before the wait
      cheap_next = ptx::opaque(tile + 1 < min(item().cheap_end, item().tiles.end) ? 1 : 0);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    finish_k(stage);
    if (ahead != 0) finish_v(stage);
    __syncthreads();
    if (ahead == 0 && !takes_turns()) load_v(item(), tile, 0);
  }
  // Two stages: asks for the tile after `tile`, to stage `stage`. Behind the item's last comes the next one's first.
  __device__ __forceinline__ void load_ahead(int tile, int stage) {
    if constexpr (C::kKeepsAddresses) {
      if (cheap_next != 0) {
        copy_next_k(tile + 1, stage);
        copy_next_v(tile + 1, stage);
        return;
      }
    }
    load_after(tile, stage, true);
  }
  // Asks for K, and V on request, of the tile after `tile`. Behind an item's last it is the next one's first: all that
  // begins with, but for Q, for which each warp asks once it has computed its last scores.
  __device__ __forceinline__ void load_after(int tile, int stage, bool with_v) {
    const bool last = tile + 1 >= item().tiles.end;
    if (last && (!C::kTakesItems || next_item().asked == 0)) return;
    const ItemOf<C>& from = own.items[C::kTakesItems && last ? 1 : 0];
    if (C::kTakesItems && last) begin_tiles(from);
    const int next = last ? from.tiles.begin : tile + 1;
    load_k(from, next, stage);
    if (with_v) load_v(from, next, stage);
  }

  // One stage: V is there for all, and all have left K.
  __device__ __forceinline__ void wait_for_v(int tile) {
    if (takes_turns()) {
      __syncthreads();  // all have left K
      load_v(item(), tile, 0);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    finish_v(0);
    __syncthreads();  // V is there for all, and all have left K
  }

 private:
  __device__ __forceinline__ NextTile& own_next_k() {
    if constexpr (C::kKeepsAddresses) {
      return next_k;
    } else {
      return own.remembered.next_k[own_thread()];
    }
  }
  __device__ __forceinline__ NextTile& own_next_v() {
    if constexpr (C::kKeepsAddresses) {
      return next_v;
    } else {
      return own.remembered.next_v[own_thread()];
    }
  }
  // Of K or 16-bit V.
  __device__ __forceinline__ static std::uint32_t first_chunk() {
    return static_cast<std::uint32_t>(PlaceK::offset(own_thread() >> 3, 0, own_thread() & 7));
  }
  // The cheap way.
  __device__ __forceinline__ void copy_next_k(int tile, int stage) {
    NextTile next = own_next_k();
    next.template copy<C, PlaceK>(k_tile(stage) + first_chunk(), tile, params.d, params.k_steps);
    own_next_k() = next;
  }
  __device__ __forceinline__ void copy_next_v(int tile, int stage) {
    NextTile next = own_next_v();
    next.template copy<OfV<C>, PlaceV>(v_tile(stage) + first_chunk(), tile, params.d_v, params.v_steps);
    own_next_v() = next;
  }
  __device__ __forceinline__ auto key_of_k() const {
    return [&tiles = params.tiles](int part, int row) {
      return tile::key_of_column<C::kLayout, C::kTileK>(tiles, part, row);
    };
  }
  __device__ __forceinline__ auto key_of_v() const {
    return [&tiles = params.tiles](int part, int row) {
      return tile::key_of_v_row<C::kLayout, C::kTileK, C::kSplitsColumns>(tiles, part, row);
    };
  }
  __device__ __forceinline__ Source k_source(const ItemOf<C>& item) const {
    return {item.k,
            params.k.row_stride * C::kElementBytes,
            item.band.key_length,
            params.d,
            params.vector_k,
            pages(item, params.k)};
  }
  __device__ __forceinline__ Source v_source(const ItemOf<C>& item) const {
    return {item.v,
            params.v.row_stride * C::kElementBytes,
            item.band.key_length,
            params.d_v - item.column,
            params.vector_v,
            pages(item, params.v)};
  }
  __device__ __forceinline__ SourcePages pages(const ItemOf<C>& item, const RowsView& view) const {
    return {params.pages.table != nullptr ? &params.pages : nullptr, item.sequence,
            view.batch_stride * C::kElementBytes};
  }
};

}  // namespace dspattn::cuda::general
