// What forward and backward of the general kernel make of a problem alike.
#pragma once

#include <algorithm>

#include "core/geometry.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/general/params.h"
#include "cuda/tile/walk.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::general {

// The diagonal's offset becomes a part of the window's bounds: any offset then fits 32 bits.
inline blocks::WorkParams work_of(const Problem& problem) {
  blocks::WorkParams work = blocks::work_of(problem);
  const core::Band band = core::band_of(problem.mask);
  work.left = -tile::clamped_reach(band.offset - band.left);
  work.right = tile::clamped_reach(band.offset + band.right);
  work.offset = 0;
  return work;
}

// How Q and scores are scaled.
struct Scaling {
  blocks::ScoreScales scales;
  float score_scale = 1;  // 2^-e where Q is not multiplied by it: it may not fit fp16
};

inline Scaling scaling_of(const Problem& problem) {
  const DType type = problem.q.dtype;
  const double scale = core::geometry_of(problem).scale;
  Scaling scaling{blocks::scales_of(type, scale, problem.mask.bias.present())};
  // 2^-e that fp16 does not hold, or that could overflow its products: scores are multiplied instead.
  if (type == DType::f16 && !(scale >= 0x1p-14 && scale < 2)) {
    scaling.scales.q_scale = 0x3C003C00u;  // 1 twice
    scaling.score_scale = static_cast<float>(core::selection_scale(scale));
  }
  return scaling;
}

// A soft cap of compared scores. Where it is beyond fp32 no score comes near it: 0, none.
inline float compared_cap(double soft_cap, const blocks::ScoreScales& scales) {
  const double cap = std::max(soft_cap * scales.bias_scale, 0x1p-126);
  return cap < 0x1p126 ? static_cast<float>(cap) : 0.0f;
}

// What becomes of scores before the softmax, in parameters that name it alike.
template <typename Params>
void set_scoring(Params& params, const Problem& problem) {
  const ConstTensorView& bias = problem.mask.bias;
  params.bias_type = bias.present() && bias.dtype != DType::f32 ? BiasType::as_inputs : BiasType::f32;
  if (problem.sinks.present()) {
    params.sinks = static_cast<const float*>(problem.sinks.data);
    params.sink_stride = problem.sinks.step(0);
  }
  const Scaling scaling = scaling_of(problem);
  params.scales = scaling.scales;
  params.score_scale = scaling.score_scale;
  params.keep = problem.pattern.is_dense() ? 0 : problem.pattern.keep;
}

}  // namespace dspattn::cuda::general
