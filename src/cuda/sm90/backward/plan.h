// How the fused backward will serve a problem: every decision of the host, a pure function of problem and device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/blocks/selection.h"
#include "cuda/device/facts.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::sm90::backward {

// What (type, pattern, head dim) a kernel was compiled for.
struct BackwardKernel {
  DType type;
  blocks::Selection selection;
  int dim;
};

// Where the parts of the workspace begin, in bytes from its own begin.
struct ScratchOffsets {
  std::size_t q = 0, d_out = 0, numbers = 0, sums = 0, mask_words = 0;
  std::size_t counters = 0, counter_bytes = 0;  // all of the following, which begin with 0
  std::size_t taken = 0, prepared = 0, finished = 0, ready = 0, counts = 0;
  std::size_t bytes = 0;  // of all
};

// Blocks of a boolean mask's bits that differ from each other (tile/key_row_masks.h), of one launch.
struct MaskBlocks {
  std::int64_t sequences = 0, heads = 0, query_tiles = 0, key_blocks = 0;  // 0: there is no mask

  std::int64_t count() const { return sequences * heads * query_tiles * key_blocks; }
};

// Columns of a boolean mask that are bits at a time: half a kilobyte a row, however many keys there are.
inline constexpr std::int64_t kMaskColumns = 4096;

struct BackwardPlan {
  int dim = 0;         // compiled for
  int tile_q = 0;      // query rows of a tile
  int keys = 0;        // of an item
  int score_keys = 0;  // of one warpgroup's scores
  int stages = 0;
  int d_copies = 0;               // of a query row's D beside its tile
  bool wraps = false;             // walks begin at their own place and go around; two sums for every query tile
  std::int64_t query_tiles = 0;   // of a head, of all sequences
  std::int64_t key_tiles = 0;     // of the longest sequence
  std::int64_t launch_tiles = 0;  // key tiles of a launch: all, but with a boolean mask those of kMaskColumns keys
  std::int64_t items = 0;         // of all launches

  // The last key tiles' launch comes first, as in a launch the last key tile of a head does: counts go on.
  std::int64_t launches() const { return launch_tiles > 0 ? (key_tiles + launch_tiles - 1) / launch_tiles : 0; }
  int head_group = 1;         // heads whose key tiles are taken in turn
  bool last_ascends = false;  // the longest walks of the last group come first (tile::GradientItems)
  MaskBlocks mask;
  bool bias_copied = false;  // its tiles come to shared memory; else every element is read from global memory
  int ctas = 0;              // of the fused kernel, one a multiprocessor
  int prepare_ctas = 0;      // of prepare_rows, one a multiprocessor, beside it
  int finish_ctas = 0;       // of finish_d_q, at most
  int threads = 0;
  ScratchOffsets scratch;
};

// Of a problem that the kernel serves.
BackwardPlan plan_backward(const BackwardKernel& kernel, const Problem& problem, const DeviceFacts& device);

std::string to_string(const BackwardPlan& plan);

}  // namespace dspattn::cuda::sm90::backward
