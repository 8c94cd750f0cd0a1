// Loads of Q, K and V tiles of 16-bit elements by TMA. One thread asks; the bytes arrive at a barrier. Panels of 64
// columns: 128 bytes, one row of the swizzle.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tma.h"

namespace dspattn::cuda::blocks {

// `panels` panels of the Q of rows from `row` on, from panel `first` on.
template <typename C>
__device__ __forceinline__ void tma_load_q_panels(const CUtensorMap& q_map, int row, int head, int batch,
                                                  std::uint32_t to, std::uint32_t full, int first, int panels) {
  ptx::mbarrier_arrive_expect(full, panels * C::kPanelQBytes);
#pragma unroll 1
  for (int panel = 0; panel < panels; ++panel) {
    ptx::tma_load_4d(to + static_cast<std::uint32_t>(panel * C::kPanelQBytes), &q_map, full, (first + panel) * 64, row,
                     head, batch);
  }
}

// The tensors that tiles of keys are loaded from. K is loaded in two halves of its groups, V in whole rows.
struct KeyTileMaps {
  const CUtensorMap& k;
  const CUtensorMap& v;
  int half_step;  // of tile::KeyMap
};

// One of the panels of a K (`keys`) or V tile, by the request `load(to, map, column, row)`.
template <typename C, typename Load>
__device__ __forceinline__ void load_panel(const KeyTileMaps& maps, std::uint32_t tile, bool keys, int panel, int row,
                                           Load load) {
  const std::uint32_t to = tile + static_cast<std::uint32_t>(panel * C::kPanelKBytes);
  load(to, keys ? &maps.k : &maps.v, panel * 64, row);
  if (keys) load(to + C::kPanelKBytes / 2, &maps.k, panel * 64, row + maps.half_step);
}

// One K or V tile.
template <typename C>
__device__ __forceinline__ void tma_load_tile(const KeyTileMaps& maps, std::uint32_t tile, std::uint32_t full,
                                              bool keys, int row, int kv_head, int batch) {
  ptx::mbarrier_arrive_expect(full, C::kTileKBytes);
#pragma unroll
  for (int panel = 0; panel < C::kPanels; ++panel) {
    load_panel<C>(maps, tile, keys, panel, row, [&](std::uint32_t to, const void* map, int column, int from) {
      ptx::tma_load_5d(to, map, full, column, 0, from, kv_head, batch);
    });
  }
}

// In a pair, this CTA's half of one K or V tile for both: the other CTA loads the other half.
template <typename C>
__device__ __forceinline__ void tma_load_half_for_both(const KeyTileMaps& maps, std::uint32_t tile, std::uint32_t full,
                                                       bool keys, int row, int kv_head, int batch, int rank) {
  constexpr std::uint16_t kBoth = 3;
  ptx::mbarrier_arrive_expect(full, C::kTileKBytes);
  load_panel<C>(maps, tile, keys, rank, row, [&](std::uint32_t to, const void* map, int column, int from) {
    ptx::tma_load_5d_multicast(to, map, full, column, 0, from, kv_head, batch, kBoth);
  });
}

}  // namespace dspattn::cuda::blocks
