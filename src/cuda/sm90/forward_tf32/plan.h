// The tf32 forward's plan.
#pragma once

#include "cuda/sm90/common/plan.h"

namespace dspattn::cuda::sm90::tf32 {

VariantTraits traits_of(int dim, Variant variant);

// Three warpgroups are faster once they have rows enough for every multiprocessor, so many times.
inline constexpr int kWideItemsPerMultiprocessor = 2;

// Of a problem that is not empty and that the kernel serves.
ForwardPlan plan_forward(int dim, const Problem& problem, const TensorView& out, const DeviceFacts& device);

// Whether the general kernel is faster: at d = 256 without masks, where its CTAs of 128 rows fill the card
// (docs/log/general.md).
bool yields(int dim, const Problem& problem, const DeviceFacts& device);

}  // namespace dspattn::cuda::sm90::tf32
