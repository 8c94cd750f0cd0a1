// The 16-bit forward's plan, and the thresholds in it. Each has a test that names its measurement
// (tests/cuda/forward_plan_test.cpp); the figures are in docs/log/forward.md.
#pragma once

#include "cuda/blocks/selection.h"
#include "cuda/sm90/common/plan.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::sm90 {

// What (type, pattern, head dim) a kernel was compiled for.
struct ForwardKernel {
  DType type;
  blocks::Selection selection;
  int dim;
};

VariantTraits traits_of(const ForwardKernel& kernel, Build build);

// From this many query rows on, three warpgroups win over two: where rows see all keys, and where they do not, when row
// tiles of 192 rows waste more on the diagonal, the more the costlier the selection is. With rest = mean a tile of keys
// costs two warpgroups more than three; not so where windows are narrow (`mean`: under windows false).
constexpr std::int64_t wide_from_rows(bool full, Pattern pattern, bool mean) {
  if (full) return 512;
  return pattern.group != 4 ? 1024 : mean ? 2048 : 8192;
}

// Where rows see all keys and items are few: row tiles of 128 end sooner than those of 192, of which more
// multiprocessors would have none.
bool narrow_is_sooner(const ForwardQuestion& question, Pattern pattern, int multiprocessors);

// Pairs for causal masks: of so many row tiles and key blocks.
inline constexpr int kPairedRowTiles = 32;
// Pairs for packed batches and key lengths: sequences of so many rows on average.
inline constexpr std::int64_t kPairedMeanRows = 512;

// Whether CTAs work in pairs that share their loads of K and V.
bool works_in_pairs(const ForwardQuestion& question, int tile_q, int multiprocessors);

// Bytes of the schedule of a problem whose lengths only the device knows; of others 0.
std::size_t schedule_bytes(const ForwardQuestion& question);
std::int64_t schedule_entries(const ForwardQuestion& question);

// Of a problem that is not empty and that the kernel serves.
ForwardPlan plan_forward(const ForwardKernel& kernel, const Problem& problem, const TensorView& out,
                         const DeviceFacts& device);

}  // namespace dspattn::cuda::sm90
