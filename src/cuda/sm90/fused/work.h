// What the producer of the fused kernel knows of an item, how it tells the others, and how it drives the copy engine.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused/softmax.h"

namespace dspattn::cuda::sm90 {

// An item as the producer needs it.
struct Work {
  int row_begin, rows;  // first query row, and rows of the sequence
  int q_row, k_row;     // rows of the tensors that hold the sequence's row 0
  int batch, sequence, head;
  tile::RowBand band;
  tile::BlockRange blocks;  // blocks of keys that any row of the item sees
  Tail tail = Tail::none;
  int common = 1;  // pairs: both blocks' keys are the same
};

// Where the sequence lies; returns its number of keys.
__device__ __forceinline__ int describe_sequence(const FusedParams& params, int sequence, Work& work) {
  work.sequence = sequence;
  work.rows = params.n_q;
  work.q_row = 0;
  work.batch = sequence;
  work.k_row = 0;
  if (params.cumulative_q == nullptr) return params.n_k;
  work.batch = 0;
  work.q_row = params.cumulative_q[sequence];
  work.rows = params.cumulative_q[sequence + 1] - work.q_row;
  work.k_row = params.cumulative_k[sequence];
  return params.cumulative_k[sequence + 1] - work.k_row;
}

// Which keys the item's rows see, of n_k.
template <typename C>
__device__ __forceinline__ void describe_keys(const FusedParams& params, int n_k, Work& work) {
  int key_length = n_k;
  if (params.key_lengths != nullptr) {
    const int given = params.key_lengths[work.sequence];
    key_length = given < key_length ? (given > 0 ? given : 0) : key_length;
  }
  work.band = {params.left, params.right, params.bottom_right != 0 ? n_k - work.rows : 0, key_length};
  const int tile_q = C::kTileQ << (C::kPairs ? params.pairs : 0);
  const int last = work.row_begin + tile_q < work.rows ? work.row_begin + tile_q - 1 : work.rows - 1;
  work.blocks = tile::visible_blocks(work.band, work.row_begin, last);
}

// Which of a pair this thread block is.
__device__ __forceinline__ int pair_rank(int pairs) { return static_cast<int>(blockIdx.x) & pairs; }

// False when there is none in this turn, or it lies past the end of its (packed) sequence.
template <typename C>
__device__ __forceinline__ bool describe_item(const FusedParams& params, int turn, Work& work) {
  const int pairs = C::kPairs ? params.pairs : 0;
  const tile::ItemPlace place =
      tile::item_of_turn<C::kShortLast>(params.order, turn, static_cast<int>(blockIdx.x) >> pairs);
  if (place.row_tile < 0) return false;
  const int sequence = params.heads.quotient(place.sequence_head);
  const int n_k = describe_sequence(params, sequence, work);
  work.head = place.sequence_head - sequence * params.heads.value;
  work.row_begin = place.row_tile * (C::kTileQ << pairs);
  if (work.row_begin >= work.rows) return false;
  describe_keys<C>(params, n_k, work);
  // A pair's blocks take the first half of the rows in turn: under a causal mask that is the cheaper one. Its rows may
  // lie past the end: then this block only brings its share of keys.
  work.row_begin += ((pair_rank(pairs) ^ turn) & pairs) * C::kTileQ;
  return true;
}

// The block of keys that comes first, and the step from one to the next, in keys.
template <typename C>
__device__ __forceinline__ bool descends(const FusedParams& params) {
  return C::kMayDescend && params.descending != 0;
}
template <typename C>
__device__ __forceinline__ int first_block(const FusedParams& params, const Work& work) {
  return descends<C>(params) ? work.blocks.end - 1 : work.blocks.begin;
}
template <typename C>
__device__ __forceinline__ int block_step(const FusedParams& params) {
  return descends<C>(params) ? -tile::kBlockKeys : tile::kBlockKeys;
}

// Writes the consumers' description; one thread does it for all.
template <typename C>
__device__ __forceinline__ void announce(const FusedParams& params, const Work& work, Item<C::kConsumers>& item) {
  item.valid = 1;
  item.row_begin = work.row_begin;
  item.rows = work.rows;
  item.batch = work.batch;
  item.out_row = work.q_row + work.row_begin;
  item.sequence = work.sequence;
  item.head = work.head;
  item.diagonal = work.band.diagonal;
  item.key_length = work.band.key_length;
  const std::int64_t row = work.q_row + work.row_begin;
  item.out_offset =
      work.batch * params.out_batch_stride + work.head * params.out_head_stride + row * params.out_row_stride;
  item.lse_offset =
      work.batch * params.lse_batch_stride + work.head * params.lse_head_stride + row * params.lse_row_stride;
#pragma unroll 1
  for (int i = 0; i < C::kConsumers; ++i) {
    const int first = work.row_begin + i * 64;
    const int last = first + 63 < work.rows ? first + 63 : work.rows - 1;
    const tile::BlockRange own = tile::visible_blocks(work.band, first, last);
    const tile::BlockRange interior = tile::interior_blocks(work.band, first, last);
    const bool any = own.end > own.begin;
    const bool down = descends<C>(params);
    const auto as_they_come = [&](const tile::BlockRange& range) {
      return down ? tile::BlockRange{work.blocks.end - range.end, work.blocks.end - range.begin}
                  : tile::BlockRange{range.begin - work.blocks.begin, range.end - work.blocks.begin};
    };
    const tile::BlockRange come = as_they_come(own);
    const tile::BlockRange unmasked = as_they_come(interior);
    const int blocks = work.blocks.end - work.blocks.begin;
    Share& share = item.shares[i];
    share.begin = any ? come.begin * C::kTilesPerBlock : 0;
    share.end = any ? come.end * C::kTilesPerBlock : 0;
    share.interior_begin = unmasked.begin;
    share.interior_end = unmasked.end;
    share.skip_before = any ? share.begin : blocks * C::kTilesPerBlock + C::kQEntries;
    share.skip_after = any ? (blocks - come.end) * C::kTilesPerBlock : 0;
  }
  item.tail = work.tail;
  item.entries = C::kQEntries + (work.blocks.end - work.blocks.begin) * C::kTilesPerBlock;
  item.k_row = work.k_row;
  item.first_block = first_block<C>(params, work);
  if constexpr (C::kPairs) item.common = static_cast<std::int16_t>(work.common);
}

// After the last item: consumers read valid == 0.
template <typename C>
__device__ __forceinline__ void announce_end(Shared<C>& shared, int number) {
  const int buffer = number % C::kQBuffers;
  ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[buffer]), (number / C::kQBuffers & 1) ^ 1);
  shared.items[number % kItemSlots].valid = 0;
  for (int i = 0; i < C::kQArrivals; ++i) ptx::mbarrier_arrive(ptx::shared_address(&shared.q_full[buffer]));
}

// Panels of the Q of rows from `row` on, from panel `first` on.
template <typename C>
__device__ __forceinline__ void load_q_panels(const FusedParams& params, int row, int head, int batch,
                                              std::uint32_t place, std::uint32_t full, int first, int panels) {
  ptx::mbarrier_arrive_expect(full, panels * C::kPanelQBytes);
#pragma unroll 1
  for (int panel = 0; panel < panels; ++panel) {
    ptx::tma_load_4d(place + static_cast<std::uint32_t>(panel * C::kPanelQBytes), &params.q_map, full,
                     (first + panel) * 64, row, head, batch);
  }
}

// Waits until the place of item number `number`'s Q and description is free.
template <typename C>
__device__ __forceinline__ void await_description(Shared<C>& shared, int number) {
  ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[number % C::kQBuffers]), (number / C::kQBuffers & 1) ^ 1);
}

// Then: Q of item number `number` of this block, but for what comes through the ring, and its description where items
// differ. Q first: it takes longer.
template <typename C>
__device__ __forceinline__ void load_q_by_engine(const FusedParams& params, Shared<C>& shared, const Work& work,
                                                 int number) {
  const int buffer = number % C::kQBuffers;
  const std::uint32_t full = ptx::shared_address(&shared.q_full[buffer]);
  load_q_panels<C>(params, work.q_row + work.row_begin, work.head, work.batch, ptx::shared_address(shared.q[buffer]),
                   full, C::kQPanelsByRing, C::kPanels - C::kQPanelsByRing);
  if constexpr (!C::kFull) {
    announce<C>(params, work, shared.items[number % kItemSlots]);
    ptx::mbarrier_arrive(full);
  }
}

// An item's first entry of the ring, where part of its Q comes that way: in K's stage, beside nothing in V's. Every
// item has it, also one without keys.
template <typename C>
__device__ __forceinline__ void load_q_entry(const FusedParams& params, int row, int head, int batch,
                                             std::uint32_t place, std::uint32_t full, bool keys) {
  if (keys) {
    load_q_panels<C>(params, row, head, batch, place, full, 0, C::kQPanelsByRing);
  } else {
    ptx::mbarrier_arrive(full);
  }
}

// Multiplies a buffer's Q by 2^-e where it lies; `thread` counts those of the three warps that share it.
template <typename C>
__device__ __forceinline__ void scale_buffer(const FusedParams& params, Shared<C>& shared, int buffer, int thread) {
  auto* data = reinterpret_cast<uint4*>(shared.q[buffer]);
#pragma unroll 1
  for (int i = thread; i < C::kTileQBytes / 16; i += 32 * C::kScalingWarps) {
    const uint4 x = data[i];
    data[i] = make_uint4(multiply_pairs<C>(x.x, params.q_scale), multiply_pairs<C>(x.y, params.q_scale),
                         multiply_pairs<C>(x.z, params.q_scale), multiply_pairs<C>(x.w, params.q_scale));
  }
  ptx::fence_async_proxy();  // the tensor core reads it
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.q_scaled[buffer]));
}

// Multiplies item number `number`'s Q by 2^-e where it lies in shared memory. By the warps after the first.
template <typename C>
__device__ __forceinline__ void scale_q(const FusedParams& params, Shared<C>& shared, int number) {
  const int buffer = number % C::kQBuffers;
  ptx::mbarrier_wait(ptx::shared_address(&shared.q_full[buffer]), number / C::kQBuffers & 1);
  scale_buffer<C>(params, shared, buffer, static_cast<int>(threadIdx.x) - 32);
}

// One of the panels of a K or V tile, by the request `load(place, map, column, row)`. K comes in two halves of its
// groups, V in whole rows.
template <typename C, typename Load>
__device__ __forceinline__ void load_panel(const FusedParams& params, std::uint32_t tile, bool keys, int panel, int row,
                                           Load load) {
  const std::uint32_t place = tile + static_cast<std::uint32_t>(panel * C::kPanelKBytes);
  load(place, keys ? &params.k_map : &params.v_map, panel * 64, row);
  if (keys) load(place + C::kPanelKBytes / 2, &params.k_map, panel * 64, row + params.keys.half_step);
}

// One K or V tile.
template <typename C>
__device__ __forceinline__ void load_tile_by_engine(const FusedParams& params, std::uint32_t tile, std::uint32_t full,
                                                    bool keys, int row, int kv_head, int batch) {
  ptx::mbarrier_arrive_expect(full, C::kTileKBytes);
#pragma unroll
  for (int panel = 0; panel < C::kPanels; ++panel) {
    load_panel<C>(params, tile, keys, panel, row, [&](std::uint32_t place, const void* map, int column, int from) {
      ptx::tma_load_5d(place, map, full, column, 0, from, kv_head, batch);
    });
  }
}

// In a pair, this block's half of one K or V tile for both blocks: the other half comes from the other block.
template <typename C>
__device__ __forceinline__ void load_half_for_both(const FusedParams& params, std::uint32_t tile, std::uint32_t full,
                                                   bool keys, int row, int kv_head, int batch, int rank) {
  constexpr std::uint16_t kBoth = 3;
  ptx::mbarrier_arrive_expect(full, C::kTileKBytes);
  load_panel<C>(params, tile, keys, rank, row, [&](std::uint32_t place, const void* map, int column, int from) {
    ptx::tma_load_5d_multicast(place, map, full, column, 0, from, kv_head, batch, kBoth);
  });
}

}  // namespace dspattn::cuda::sm90
