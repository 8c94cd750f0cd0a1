// What a CTA works on: a part of the keys of a unit, which is a (sequence, key head, tile of its query rows).
#pragma once

#include "cuda/decode/params.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/near.h"

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
    Part part = place(p);
    if (p.key_lengths.present()) ptx::wait_for_kernels_before();  // lengths are inputs
    part.see<C>(p, tile::visible_keys(p.key_lengths, part.batch, p.n_k));
    return part;
  }

  // Of a length that may still be written, before anything may be read: what it will nearly be.
  template <typename C>
  __device__ __forceinline__ static Part early(const Params& p) {
    Part part = place(p);
    int length = p.n_k;
    if (p.key_lengths.present()) {
      length = tile::clamp_length(ptx::peek(p.key_lengths.data + part.batch * p.key_lengths.stride), 0, p.n_k);
    }
    part.see<C>(p, length);
    return part;
  }
  // After early(): what it is.
  template <typename C>
  __device__ __forceinline__ void see_length(const Params& p) {
    if (!p.key_lengths.present()) return;
    ptx::wait_for_kernels_before();
    see<C>(p, tile::visible_keys(p.key_lengths, batch, p.n_k));
  }

  // Head of the key head's, and query, of row `row` of this part; past the last, of that.
  __device__ __forceinline__ tile::PackedRow packed_row(const Params& p, int row) const {
    return p.packed_row(first_row + min(row, rows - 1));
  }

 private:
  __device__ __forceinline__ static Part place(const Params& p) {
    Part part;
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
    return part;
  }
  template <typename C>
  __device__ __forceinline__ void see(const Params& p, int length) {
    band = {p.left, p.right, p.diagonal, length};
    begin = band.begin(first_query);
    end = band.end(last_query);
    const tile::KeyBlockRange blocks = tile::visible_key_blocks(band, first_query, last_query);
    tiles = tile::part_of_range({blocks.begin * C::kTilesPerBlock, blocks.end * C::kTilesPerBlock}, split, p.splits);
  }
};

}  // namespace dspattn::cuda::decode
