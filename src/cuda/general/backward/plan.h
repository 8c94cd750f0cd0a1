// How the general backward will serve a problem: every decision of the host, a pure function of problem and device,
// printed by `dspattn kernels`. Launching only fills parameters from a plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/device/facts.h"
#include "cuda/general/backward/config.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::general::backward {

// One of the two kernels: what it was compiled with, and how it runs.
struct KernelPlan {
  int rows = 0;  // of a query tile
  int keys = 0;  // of a CTA's key tiles, or of a step
  int threads = 0;
  int stages = 1;  // of K and V, or of Q and dO
  int shared_bytes = 0;
  int resident = 1;  // CTAs of a multiprocessor, as far as registers and shared memory go
  std::int64_t ctas = 0;
};

// Where the parts of the workspace begin, in bytes from its own begin.
struct WorkspaceOffsets {
  std::size_t q = 0, d_out = 0, numbers = 0, keys = 0, bias_parts = 0, sums = 0, counts = 0, taken = 0;
  std::size_t bytes = 0;  // of all
};

struct BackwardPlan {
  Kind kind = Kind::any;
  int dim = 0;     // compiled for
  int stride = 0;  // bytes of a prepared row
  int row_tiles = 0, row_units = 0;
  int column_parts = 1;  // of dQ, where a CTA of the query-stationary kernel does not make all columns
  int key_groups = 0, tile_units = 0;
  int head_group = 1;         // (sequence, key head) pairs whose key groups CTAs take in turn (tile::GradientItems)
  bool last_ascends = false;  // the last group's longest walks come first
  std::int64_t head_rows = 0, head_tiles = 0;  // prepared ones
  KernelPlan queries, keys;
  bool loads_keys = false;        // the key-stationary kernel takes K and V from the inputs: no prepared copies
  bool adds_queries = false;      // the key-stationary kernel makes dQ, too: no kernel of its own
  bool wraps = false;             // walks begin at their own place and go around; two sums for every query tile
  bool is_plain = false;          // Features::plain
  bool has_key_rows = false;      // keys are the rows of scores (Config::kKeyRows)
  bool finds_references = false;  // references.h
  WorkspaceOffsets workspace;
};

// Of a problem with heads and sequences. d_bias: absent where its gradient is not asked for.
BackwardPlan plan_backward(const Problem& problem, const TensorView& d_bias, const DeviceFacts& device);

std::string to_string(const BackwardPlan& plan);

}  // namespace dspattn::cuda::general::backward
