// How an instance of the split-key kernel is launched.
#pragma once

#include "cuda/decode/kernel.h"
#include "cuda/decode/launch.h"
#include "cuda/decode/together_kernels.h"
#include "cuda/device/device.h"

namespace dspattn::cuda::decode {

template <typename C, typename Kernel>
void launch_one(const char* name, Kernel kernel, const Params& params, std::int64_t ctas, cudaStream_t stream) {
  const DeviceFacts& device = current_device_facts();
  allow_shared_memory(kernel, device.shared_bytes);  // the same number for every problem
  if (params.cluster.value > kPortableCluster) check(ptx::allow_large_clusters(kernel), "allowing large clusters");
  launch(name, kernel,
         {.ctas = grid_of(ctas),
          .threads = 32 * params.teams.cta_warps(),
          .shared_bytes = params.layout.bytes,
          .cluster_ctas = params.cluster.value,
          .may_overlap = device.major >= 9},
         stream, params);
}

template <DType kType, int kDim>
void launch_kernel(const Params& params, std::int64_t ctas, cudaStream_t stream) {
  using C = Config<kType, kDim>;
  static_assert(shared_layout(kType, kDim, {}).bytes <= kSharedLimit);
  if constexpr (chooses_together(kType, kDim)) {
    if (params.teams.stay != 0) return launch_one<C>("decode together", together_kernel<C>, params, ctas, stream);
    if (params.teams.chosen != 0) {
      Params scoring = params;
      scoring.teams.chosen = 0;
      scoring.teams.gather = 0;
      scoring.teams.lanes = 0;
      scoring.teams.scoring = 1;
      scoring.teams.cluster = 1;
      scoring.layout = shared_layout(kType, kDim, scoring.teams);
      scoring.cluster = tile::Divisor(1);
      const bool lanes = params.teams.lanes != 0;
      launch_one<C>("decode scores", lanes ? lane_scores_kernel<C> : score_kernel<C>, scoring, ctas, stream);
      return launch_one<C>("decode choice", lanes ? lane_choice_kernel<C> : choice_kernel<C>, params, ctas, stream);
    }
  }
  launch_one<C>("decode", decode_kernel<C>, params, ctas, stream);
}

}  // namespace dspattn::cuda::decode
