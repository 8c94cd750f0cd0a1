// Coarse block masks in blocked-ELL form: which blocks of keys a block of queries may see at all. The three-kernel
// pipeline (pipeline.h) computes, stores and reads only those blocks, and prunes N:M inside them.
//
//   dspattn::BlockMask mask = dspattn::bigbird_blocks(n_q, n_k, {.block = 64, .window = 1, .global = 1, .random = 3});
//   args.blocks = mask.view();          // on the CPU; on a GPU, copy counts and columns there and view those
#pragma once

#include <cstdint>
#include <vector>

#include "dspattn/tensor_view.h"

namespace dspattn {

// Block row r covers queries r * block ... r * block + block-1, block column c keys likewise; the last ones may be
// partial. Row r sees the blocks columns[r][0 ... counts[r]-1], ascending; what follows them in the row is -1.
struct BlockMaskView {
  int block = 0;            // 64 or 128
  ConstTensorView counts;   // int32 [block_rows]
  ConstTensorView columns;  // int32 [block_rows, width], row-major
  bool present() const { return block != 0 || counts.present() || columns.present(); }
  std::int64_t width() const { return columns.rank == 2 ? columns.extent(1) : 0; }
};

// The same in host memory of its own.
struct BlockMask {
  int block = 64;
  std::int64_t n_q = 0, n_k = 0;
  std::int64_t width = 0;
  std::vector<std::int32_t> counts;
  std::vector<std::int32_t> columns;

  std::int64_t block_rows() const { return (n_q + block - 1) / block; }
  std::int64_t block_columns() const { return (n_k + block - 1) / block; }
  bool allows(std::int64_t query, std::int64_t key) const;  // throws dspattn::Error for one that there is not
  double density() const;                                   // blocks kept over all blocks; 0 for an empty mask
  BlockMaskView view() const;
};

// From the block columns of each block row, in any order, each once. Throws dspattn::Error for a block size that is not
// 64 or 128, a wrong number of rows, a column that does not exist or is given twice.
BlockMask make_block_mask(std::int64_t n_q, std::int64_t n_k, int block,
                          const std::vector<std::vector<std::int32_t>>& rows);

// What each of the named masks is made of, counted in blocks. The diagonal is bottom-right aligned, as causal masks
// are: the last block row sits at the last block column. A member means the same in all of them.
struct SlidingWindowParts {
  int block = 64;
  std::int64_t window = 1;  // blocks to either side of the diagonal one
  bool causal = false;      // leave out blocks right of the diagonal one
};
struct LongformerParts {
  int block = 64;
  std::int64_t window = 1;
  std::int64_t global = 0;  // first blocks that every row sees, and first block rows that see every block
  bool causal = false;
};
struct BigbirdParts {
  int block = 64;
  std::int64_t window = 1;
  std::int64_t global = 0;
  std::int64_t random = 0;  // further blocks of each row
  std::uint64_t seed = 0;   // of the random blocks; the same seed gives the same mask everywhere
  bool causal = false;
};

// Window only.
BlockMask sliding_window_blocks(std::int64_t n_q, std::int64_t n_k, const SlidingWindowParts& parts);
// Window and global blocks (Beltagy et al. 2020).
BlockMask longformer_blocks(std::int64_t n_q, std::int64_t n_k, const LongformerParts& parts);
// Window, global and random blocks (Zaheer et al. 2020).
BlockMask bigbird_blocks(std::int64_t n_q, std::int64_t n_k, const BigbirdParts& parts);

}  // namespace dspattn
