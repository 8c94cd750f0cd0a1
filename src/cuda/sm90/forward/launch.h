// Which variants an instance of the 16-bit forward has, and how each is launched.
#pragma once

#include "cuda/sm90/common/launch.h"
#include "cuda/sm90/forward/config.h"
#include "cuda/sm90/forward/kernel.h"

namespace dspattn::cuda::sm90 {

template <typename C>
void launch_fused(const ForwardParams& params, const ForwardPlan& plan, cudaStream_t stream) {
  launch_plan("the fused kernel", &fused_forward<C>, kSharedBytes<C>, params, plan, stream);
}

template <DType kType, Selection kSelection, int kDim, bool kHasGeneral>
Launcher compiled(Variant variant) {
  switch (variant) {
    case Variant::wide:
      if constexpr (has_wide(kDim)) return &launch_fused<Config<kType, kSelection, kDim, Variant::wide>>;
      break;
    case Variant::narrow:
      return &launch_fused<Config<kType, kSelection, kDim, Variant::narrow>>;
    case Variant::full:
      if constexpr (has_full(kDim)) return &launch_fused<Config<kType, kSelection, kDim, Variant::full>>;
      break;
    case Variant::general:
      if constexpr (kHasGeneral) return &launch_fused<Config<kType, kSelection, kDim, Variant::general>>;
      break;
  }
  return nullptr;
}

// With rest = mean.
template <DType kType, Selection kSelection, int kDim>
Launcher compiled_mean(Variant variant) {
  switch (variant) {
    case Variant::wide:
      if constexpr (has_mean_wide(kType, kDim)) {
        return &launch_fused<Config<kType, kSelection, kDim, Build(Variant::wide, true)>>;
      }
      break;
    case Variant::narrow:
      return &launch_fused<Config<kType, kSelection, kDim, Build(Variant::narrow, true)>>;
    case Variant::full:
      if constexpr (has_mean_full(kType, kDim)) {
        return &launch_fused<Config<kType, kSelection, kDim, Build(Variant::full, true)>>;
      }
      break;
    case Variant::general:
      if constexpr (mean_general_dim(kDim) == kDim) {
        return &launch_fused<Config<kType, kSelection, kDim, Build(Variant::general, true)>>;
      }
      break;
  }
  return nullptr;
}

}  // namespace dspattn::cuda::sm90
