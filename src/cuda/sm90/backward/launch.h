// From a kernel's choices to its launch.
#pragma once

#include "cuda/device/device.h"
#include "cuda/sm90/backward/kernel.h"

namespace dspattn::cuda::sm90::backward {

template <typename C>
void launch_fused(const BackwardParams& params, int ctas, cudaStream_t stream) {
  allow_shared_memory(&fused_backward<C>, kSharedBytes<C>);
  launch("the fused backward", &fused_backward<C>,
         {.ctas = static_cast<unsigned>(ctas),
          .threads = C::kThreads,
          .shared_bytes = kSharedBytes<C>,
          .may_overlap = true},
         stream, params);
}

}  // namespace dspattn::cuda::sm90::backward
