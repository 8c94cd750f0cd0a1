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
  using PlaceQ = Swizzled<C::kTileQ>;
  using PlaceK = Swizzled<C::kTileK>;
  using PlaceV = std::conditional_t<C::kIsFp32, PlainRows<C::kVRowBytes>, Swizzled<C::kTileK>>;

  const ForwardParams& params;
  const RowsItem& item;
  std::uint32_t shared;  // Q, then K and V of one stage after the other

  __device__ __forceinline__ std::uint32_t k_tile(int stage) const {
    return shared + static_cast<std::uint32_t>(C::kQBytes + stage * (C::kKBytes + C::kVBytes));
  }
  __device__ __forceinline__ std::uint32_t v_tile(int stage) const {
    return k_tile(stage) + (takes_turns() ? 0 : C::kKBytes);
  }
  // K and V in one place.
  __device__ __forceinline__ bool takes_turns() const { return C::kLeastStages == 0 && params.stages == 0; }

  __device__ __forceinline__ void load_q() const {
    const Source source{item.q, params.q.row_stride * C::kElementBytes, item.rows - item.row_begin, params.d,
                        params.vector_q};
    if constexpr (!C::kAll) return copy_any_rows<C, PlaceQ, C::kTileQ>(shared, source, [](int row) { return row; });
    const std::int64_t head_bytes = params.q.head_stride * C::kElementBytes;
    copy_rows_at<C, PlaceQ, C::kTileQ>(shared, source, [&](int row) -> RowAt {
      const int position = params.group.position(row);
      return {position < source.rows && params.group.exists(row),
              position * source.row_bytes + params.group.head(row) * head_bytes};
    });
  }
  __device__ __forceinline__ void load_k(int tile, int stage) const {
    const tile::KeyTiles& tiles = params.tiles;
    const Source source{
        item.k,         params.k.row_stride * C::kElementBytes, item.band.key_length, params.d, params.vector_k,
        pages(params.k)};
    copy_tile<C, PlaceK>(k_tile(stage), source, tiles, tiles.first_key(tile), tiles.part(tile), [&](int part, int row) {
      return tile::key_of_column<C::kLayout, C::kTileK>(tiles, part, row);
    });
  }
  __device__ __forceinline__ void load_v(int tile, int stage) const {
    const tile::KeyTiles& tiles = params.tiles;
    const Source source{item.v,
                        params.v.row_stride * C::kElementBytes,
                        item.band.key_length,
                        params.d_v - item.column,
                        params.vector_v,
                        pages(params.v)};
    copy_tile<OfV<C>, PlaceV>(v_tile(stage), source, tiles, tiles.first_key(tile), tiles.part(tile),
                              [&](int part, int row) {
                                return tile::key_of_v_row<C::kLayout, C::kTileK, C::kSplitsColumns>(tiles, part, row);
                              });
  }

  // What this thread has copied has arrived: Q times 2^-e, or everything rounded to tf32. The barrier that follows
  // shows it to the others.
  __device__ __forceinline__ void finish_q() const {
    each_own_chunk<C, PlaceQ, C::kTileQ>([&](std::uint32_t at) {
      if constexpr (C::kIsTf32) {
        round_chunk(shared + at);
      } else if constexpr (!C::kIsFp32) {
        scale_chunk<C>(shared + at, params.scales.q_scale);
      }
    });
  }
  __device__ __forceinline__ void finish_k(int stage) const {
    if constexpr (C::kIsTf32) {
      each_own_chunk<C, PlaceK, C::kTileK>([&](std::uint32_t at) { round_chunk(k_tile(stage) + at); });
    }
  }
  __device__ __forceinline__ void finish_v(int stage) const {
    if constexpr (C::kIsTf32) {
      each_own_chunk<OfV<C>, PlaceV, C::kTileK>([&](std::uint32_t at) { round_chunk(v_tile(stage) + at); });
    }
  }

  // One stage: V is there for all, and all have left K.
  __device__ __forceinline__ void wait_for_v(int tile) const {
    if (takes_turns()) {
      __syncthreads();  // all have left K
      load_v(tile, 0);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    finish_v(0);
    __syncthreads();  // V is there for all, and all have left K
  }

 private:
  __device__ __forceinline__ SourcePages pages(const RowsView& view) const {
    return {params.pages.table != nullptr ? &params.pages : nullptr, item.sequence,
            view.batch_stride * C::kElementBytes};
  }
};

}  // namespace dspattn::cuda::general
