// How an instance of the split-key kernel is launched.
#pragma once

#include "cuda/decode/kernel.h"
#include "cuda/decode/launch.h"
#include "cuda/decode/together.h"
#include "cuda/device/device.h"

namespace dspattn::cuda::decode {

template <typename C, typename Kernel>
void launch_one(const char* name, Kernel kernel, const Params& params, std::int64_t ctas, bool follows,
                cudaStream_t stream) {
  const DeviceFacts& device = current_device_facts();
  allow_shared_memory(kernel, device.shared_bytes);  // the same number for every problem
  launch(name, kernel,
         {.ctas = grid_of(ctas),
          .threads = kThreads,
          .shared_bytes = shared_layout(C::kType, C::kHeadDim, params.teams).bytes,
          .may_overlap = follows && device.major >= 9},
         stream, params);
}

template <DType kType, int kDim>
void launch_kernel(const Params& params, std::int64_t ctas, cudaStream_t stream) {
  using C = Config<kType, kDim>;
  static_assert(shared_layout(kType, kDim, {}).bytes <= kSharedLimit);
  if constexpr (chooses_together(kType, kDim)) {
    if (params.together.scores != nullptr) {
      launch_one<C>("decode scores", score_kernel<C>, params, ctas, false, stream);
      Params choice = params;
      choice.teams.batch = params.together.batch;
      launch_one<C>("decode choice", choice_kernel<C>, choice, ctas, true, stream);
      return;
    }
  }
  launch_one<C>("decode", decode_kernel<C>, params, ctas, false, stream);
}

}  // namespace dspattn::cuda::decode
