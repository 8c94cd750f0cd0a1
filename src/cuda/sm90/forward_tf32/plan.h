// The tf32 forward's plan.
#pragma once

#include "cuda/sm90/common/plan.h"

namespace dspattn::cuda::sm90::tf32 {

VariantTraits traits_of(int dim, Variant variant);

// Three warpgroups are faster once they have rows enough for every multiprocessor, so many times, and unless the last
// rows of a head leave two of them idle: a tile of 192 rows takes about 5/4 of the time of one of 128 (455 against
// 545 us with three and with two warpgroups, docs/log/forward.md).
inline constexpr int kWideItemsPerMultiprocessor = 2;
inline constexpr int kWideTileTime = 5, kNarrowTileTime = 4;

// Of a problem that is not empty and that the kernel serves.
ForwardPlan plan_forward(int dim, const Problem& problem, const TensorView& out, const DeviceFacts& device);

}  // namespace dspattn::cuda::sm90::tf32
