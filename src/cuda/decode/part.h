// What a CTA works on: a part of the keys of a unit, which is a (sequence, key head, tile of its query rows).
#pragma once

#include "cuda/decode/params.h"
#include "cuda/ptx/barrier.h"

namespace dspattn::cuda::decode {

// Parameters lie in constant memory, of which nothing is cached when a launch begins: a first access takes as long as
// to the L2 cache. Brings them near while kernels before still run. An access is of 64 bytes; the compiler must not
// know that nobody wants the result.
__device__ __forceinline__ void touch_parameters(const Params& p, std::uint8_t* shared) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(&p);
  std::uint32_t all = words[sizeof(Params) / 4 - 1];
#pragma unroll
  for (int line = 0; line < static_cast<int>(sizeof(Params) / 64); ++line) all ^= words[16 * line];
  if ((threadIdx.x & 31) == 0) {
    ptx::store_shared(ptx::shared_address(shared + p.layout.touched + threadIdx.x / 8), all);
  }
}

struct Part {
  int unit, split;
  int batch, kv_head;
  int first_row, rows;  // of the key head's, which are those of all heads that share it
  int first_query, last_query;
  tile::RowBand band;
  tile::TileRange tiles;
  int begin, end;  // keys that some row sees lie in here

  template <typename C>
  __device__ __forceinline__ static Part of_cta(const Params& p) {
    Part part;
    if (p.key_lengths.present()) ptx::wait_for_kernels_before();  // lengths are inputs
    part.unit = p.splits.quotient(static_cast<int>(blockIdx.x));
    part.split = static_cast<int>(blockIdx.x) - part.unit * p.splits.value;
    const int key_head = p.row_tiles.quotient(part.unit);
    part.batch = p.kv_heads.quotient(key_head);
    part.kv_head = key_head - part.batch * p.kv_heads.value;
    part.first_row = (part.unit - key_head * p.row_tiles.value) * p.rows;
    part.rows = min(p.rows, p.all_rows - part.first_row);
    const tile::PackedRow first = p.packed_row(part.first_row), last = p.packed_row(part.first_row + part.rows - 1);
    part.first_query = first.head == last.head ? first.query : 0;
    part.last_query = first.head == last.head ? last.query : p.n_q - 1;
    part.band = {p.left, p.right, p.diagonal, tile::visible_keys(p.key_lengths, part.batch, p.n_k)};
    part.begin = part.band.begin(part.first_query);
    part.end = part.band.end(part.last_query);
    part.tiles = part.tiles_of<C>(p, part.split);
    return part;
  }

  // Of any of the unit's CTAs.
  template <typename C>
  __device__ __forceinline__ tile::TileRange tiles_of(const Params& p, int any_split) const {
    const tile::KeyBlockRange blocks = tile::visible_key_blocks(band, first_query, last_query);
    return tile::part_of_range({blocks.begin * C::kTilesPerBlock, blocks.end * C::kTilesPerBlock}, any_split, p.splits);
  }

  // Head of the key head's, and query, of row `row` of this part; past the last, of that.
  __device__ __forceinline__ tile::PackedRow packed_row(const Params& p, int row) const {
    return p.packed_row(first_row + min(row, rows - 1));
  }
};

}  // namespace dspattn::cuda::decode
