// What the host tells the kernels of the fused backward: one struct, passed by value.
#pragma once

#include <cstdint>

#include "cuda/blocks/scales.h"
#include "cuda/blocks/views.h"
#include "cuda/blocks/work_params.h"
#include "cuda/tile/gradient_walk.h"
#include "cuda/tile/key_map.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::sm90::backward {

using namespace blocks;

// Of a query row: the log-sum-exp in base 2, +inf where the row sees no key, and D.
struct RowNumbers {
  float lse;
  float d;
};

// Of a lane's two neighbouring queries 8j + 2t and the next, as it loads them: log-sum-exps of two such pairs, j even
// and the next, in 16 bytes; and -D of one pair, which its accumulators of dP begin with: twice, once for each of the
// lane's keys, where there is room for that.
DSPATTN_HOST_DEVICE constexpr int lse_place(int row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}
DSPATTN_HOST_DEVICE constexpr int d_place(int row, int copies) { return row / 2 * 2 * copies + row % 2; }

// What is said of a tile is there more than once, for lanes to load by addresses of their own: what all lanes load from
// one address the compiler moves to uniform registers, and for that it waits at once.
inline constexpr int kMarkCopies = 4;

// Those of a query tile, and what its rows have in common.
template <int kRows, int kCopies>
struct alignas(16) TileNumbers {
  float lse[kRows];                   // lse_place()
  float minus_d[kCopies * kRows];     // d_place(), and further copies behind each pair
  std::int32_t has_nan[kMarkCopies];  // a row's log-sum-exp is NaN
};
DSPATTN_HOST_DEVICE constexpr int tile_number_words(int rows, int copies) { return rows * (1 + copies) + kMarkCopies; }
static_assert(sizeof(TileNumbers<64, 2>) == 4 * tile_number_words(64, 2));
inline constexpr int kCountsOfShare = 4;  // every warp of a query warpgroup counts its part

// In the workspace, all indexed by query tile: tile `t` of head `h` is number h * query_tiles + t.
struct Scratch {
  std::uint8_t* q = nullptr;         // tiles of Q times 2^-e, as they lie in shared memory; absent rows are zeros
  std::uint8_t* d_out = nullptr;     // and of dO
  std::uint8_t* numbers = nullptr;   // TileNumbers
  float* sums = nullptr;             // [sum][tile]: dQ / scale, in fp32 (tile/gradient_walk.h)
  std::int32_t* counts = nullptr;    // [sum][tile]: shares that have been added
  std::int32_t* ready = nullptr;     // [sequence][key head]: query tiles that prepare_rows has written
  std::int32_t* prepared = nullptr;  // CTAs of it that have written all of theirs
  std::int32_t* finished = nullptr;  // parts of dQ that warps of finish_d_q have taken
  std::int32_t* taken = nullptr;     // [launch]: items that CTAs have taken
};

// A boolean mask as bits (tile/key_row_masks.h), in the workspace: blocks of 64 queries by 128 keys, those of one
// launch.
struct MaskWords {
  std::uint32_t* data = nullptr;                     // null: there is no mask
  int batch_step = 0, head_step = 0, tile_step = 0;  // in blocks, from one to the next; 0 where it is broadcast

  DSPATTN_HOST_DEVICE constexpr int block(int sequence, int head, int query_tile, int key_block) const {
    return sequence * batch_step + head * head_step + query_tile * tile_step + key_block;
  }
};

struct BackwardParams {
  RowsView q, k, v, out, d_out;
  LseView lse;    // read only
  LseView d_lse;  // read only; null: there is none
  OutView d_q, d_k, d_v;
  MaskTensor allowed;  // bytes, zero = masked
  MaskTensor bias;
  int bias_bytes = 0;   // of an element: 4 (fp32), or 2 (the inputs' type)
  int bias_copied = 0;  // 1: its tiles come to shared memory
  MaskWords mask_words;
  WorkParams work;
  tile::KeyMap keys;
  ScoreScales scales;
  Scratch scratch;

  DType type = DType::bf16;
  int dim = 0;             // head dim that the kernel is compiled for
  int tile_q = 0;          // rows of a query tile
  int d_copies = 0;        // of D in a tile's numbers
  int d = 0, value_d = 0;  // columns of Q and K, of V and dO
  float d_q_scale = 1;     // from sums to dQ
  float d_k_scale = 1;     // from accumulators, whose Q is scaled, to dK
  int vector_q = 0, vector_k = 0, vector_v = 0, vector_out = 0, vector_d_out = 0;  // rows are 16-byte aligned
  int vector_d_q = 0, vector_d_k = 0, vector_d_v = 0;
  int sequences = 0;
  tile::Divisor kv_heads;
  int query_tiles = 0;  // of a head, of all sequences
  tile::GradientItems order;
  int block_tiles = 1;     // key tiles of a key block
  int launches = 1;        // of the kernel, a range of key tiles each; what follows is of one
  int launch = 0;          // which
  int first_key_tile = 0;  // of every head, that `order` counts from; a key block begins with it
  int items = 0;
  int prepare_ctas = 0, finish_ctas = 0;  // of the kernels over rows
  int wraps = 0;                          // see tile/gradient_walk.h; then there are two sums
};

}  // namespace dspattn::cuda::sm90::backward
