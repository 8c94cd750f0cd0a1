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
// tiles of 192 rows waste more on the diagonal, the more the costlier the selection is.
constexpr std::int64_t wide_from_rows(bool full, Pattern pattern) {
  return full ? 512 : pattern.group == 4 ? 8192 : 1024;
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

// rest = mean: the kernel writes the means of V itself where sequences have so many keys, in whole blocks, and every
// block of V so many query rows. By reckoning (docs/rest.md): a task of a warp, 16 columns of a block, takes 0.3 to 0.5
// us, and for fewer rows the consumers would wait for it. With more keys the kernel before, 18 to 29 us at 16,384
// tokens, is 2 to 3 % of the call, and stays.
inline constexpr std::int64_t kLeastOwnKeys = 512;
inline constexpr std::int64_t kMostOwnKeys = 2048;
inline constexpr std::int64_t kLeastOwnRows = 512;

// Of a problem that is not empty and that the kernel serves.
ForwardPlan plan_forward(const ForwardKernel& kernel, const Problem& problem, const TensorView& out,
                         const DeviceFacts& device);

}  // namespace dspattn::cuda::sm90
