// The tf32 forward's plan.
#pragma once

#include "cuda/sm90/common/plan.h"

namespace dspattn::cuda::sm90::tf32 {

VariantTraits traits_of(int dim, Variant variant);

// Three warpgroups are faster once they have rows enough for every multiprocessor, so many times.
inline constexpr int kWideItemsPerMultiprocessor = 2;

// Of a problem that is not empty and that the kernel serves.
ForwardPlan plan_forward(int dim, const Problem& problem, const TensorView& out, const DeviceFacts& device);

}  // namespace dspattn::cuda::sm90::tf32
