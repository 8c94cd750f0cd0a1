// Which variants an instance of the 16-bit forward has, and how each is launched.
#pragma once

#include <cstdlib>
#include "cuda/sm90/common/launch.h"
#include "cuda/sm90/forward/config.h"
#include "cuda/sm90/forward/instance.h"
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
template <DType kType, Selection kSelection, int kDim, int kExp>
Launcher compiled_mean_of(Variant variant) {
  switch (variant) {
    case Variant::wide:
      if constexpr (has_mean_wide(kSelection, kType, kDim)) {
        return &launch_fused<Config<kType, kSelection, kDim, Build(Variant::wide, true, kExp)>>;
      }
      break;
    case Variant::narrow:
      return &launch_fused<Config<kType, kSelection, kDim, Build(Variant::narrow, true, kExp)>>;
    case Variant::full:
      if constexpr (has_mean_full(kType, kDim)) {
        return &launch_fused<Config<kType, kSelection, kDim, Build(Variant::full, true, kExp)>>;
      }
      break;
    case Variant::general:
      if constexpr (mean_general_dim(kDim) == kDim && kExp == 0) {
        return &launch_fused<Config<kType, kSelection, kDim, Build(Variant::general, true, kExp)>>;
      }
      break;
  }
  return nullptr;
}

template <DType kType, Selection kSelection, int kDim>
Launcher compiled_mean(Variant variant) {
  if constexpr (kType == DType::bf16 && kDim <= 128) {
    if (variant != Variant::general) {
      const char* e = std::getenv("REST_EXP");
      const int x = e ? std::atoi(e) : 0;
      if (x == 1) return mean_exp_launcher<kType, kSelection, kDim, 1>(variant);
      if (x == 2) return mean_exp_launcher<kType, kSelection, kDim, 2>(variant);
      if (x == 3) return mean_exp_launcher<kType, kSelection, kDim, 3>(variant);
      if (x == 4) return mean_exp_launcher<kType, kSelection, kDim, 4>(variant);
    }
  }
  return compiled_mean_of<kType, kSelection, kDim, 0>(variant);
}

}  // namespace dspattn::cuda::sm90
