// What forward and backward of the general kernel make of a problem alike.
#pragma once

#include "core/geometry.h"
#include "cuda/blocks/problem_params.h"
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

}  // namespace dspattn::cuda::general
