// How an instance of the split-key kernel is launched.
#pragma once

#include "cuda/decode/kernel.h"
#include "cuda/decode/launch.h"
#include "cuda/device/device.h"

namespace dspattn::cuda::decode {

// Of every way the warps can be teamed: the most shared memory.
template <typename C>
constexpr int most_shared_bytes() {
  int most = 0;
  for (const int warps : {1, 2, 4}) {
    const int bytes = shared_layout(C::kType, C::kHeadDim, {.warps = warps}).bytes;
    most = bytes > most ? bytes : most;
  }
  return most;
}

template <DType kType, int kDim>
void launch_kernel(const Params& params, std::int64_t ctas, cudaStream_t stream) {
  using C = Config<kType, kDim>;
  static_assert(most_shared_bytes<C>() <= kSharedLimit);
  const int allowed = current_device_facts().shared_bytes;
  allow_shared_memory(decode_kernel<C>, allowed < most_shared_bytes<C>() ? allowed : most_shared_bytes<C>());
  launch("decode", decode_kernel<C>,
         {.ctas = grid_of(ctas), .threads = kThreads, .shared_bytes = shared_layout(kType, kDim, params.teams).bytes},
         stream, params);
}

}  // namespace dspattn::cuda::decode
