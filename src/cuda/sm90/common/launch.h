// How a plan becomes a launch: what every compiled instance of a fused forward kernel needs.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device/device.h"
#include "cuda/sm90/common/forward_plan.h"
#include "cuda/sm90/common/params.h"

namespace dspattn::cuda::sm90 {

// Launches the kernel of a variant; null: not compiled.
using Launcher = void (*)(const ForwardParams& params, const ForwardPlan& plan, cudaStream_t stream);

// With a schedule, with means of V, or where items are alike, it may start while the kernel before still runs: it waits
// for that itself.
template <typename Kernel>
void launch_plan(const char* name, Kernel kernel, int shared_bytes, const ForwardParams& params,
                 const ForwardPlan& plan, cudaStream_t stream) {
  allow_shared_memory(kernel, shared_bytes);
  launch(name, kernel,
         {.ctas = static_cast<unsigned>(plan.ctas),
          .threads = plan.threads,
          .shared_bytes = shared_bytes,
          .cluster_ctas = plan.pairs ? 2 : 1,
          .may_overlap = plan.walk == Walk::schedule || plan.overlaps || plan.means.present},
         stream, params);
}

}  // namespace dspattn::cuda::sm90
