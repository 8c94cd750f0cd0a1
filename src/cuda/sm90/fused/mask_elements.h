// Mask tensors element by element, in the accumulator's layout: beyond d = 128, where bringing them through shared
// memory did not end (docs/fused_kernel.md).
#pragma once

#include <cstdint>

#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/mask_pointers.h"
#include "cuda/sm90/fused/params.h"
#include "cuda/sm90/fused/softmax.h"

namespace dspattn::cuda::sm90 {

// Calls visit(register of the score of row g, offset of its key) for a thread's scores; row g + 8 is two registers
// further. Absent keys read key 0's: they are masked afterwards.
template <typename C, typename Visit>
__device__ __forceinline__ void for_elements(const FusedParams& params, const MaskPointers& mask, int keys, int part,
                                             int t, Visit visit) {
#pragma unroll
  for (int m = 0; m < C::kTileK / 16; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = ptx::opaque(params.keys.key(part, 4 * m + t, e));
      visit(score_index<C>(m, e), (key < keys ? key : 0) * mask.key_bytes);
    }
  }
}

// Adds the bias; -inf masks.
template <typename C>
__device__ __forceinline__ void add_bias(Scores<C>& scores, const FusedParams& params, const MaskPointers& bias,
                                         int keys, int part, int t) {
  const auto load = [&](const std::uint8_t* pointer) {
    if (params.bias_is_f32 != 0) return *reinterpret_cast<const float*>(pointer);
    const std::uint32_t bits = *reinterpret_cast<const std::uint16_t*>(pointer);
    if constexpr (C::kType == DType::bf16) return __uint_as_float(bits << 16);
    float low, high;
    ptx::unpack_f16x2(bits, low, high);
    return low;
  };
  constexpr float kLowest = -65408.0f;  // kLowestBiasedPair
  const auto biased = [&](float score, float by) {
    float sum = fmaf(by, params.bias_scale, score);
    sum = sum < kLowest ? kLowest : sum;
    return by == -INFINITY ? by : sum;  // masked, whatever the score is
  };
  for_elements<C>(params, bias, keys, part, t, [&](int i, int at) {
    scores[i] = biased(scores[i], load(bias.row0 + at));
    scores[i + 2] = biased(scores[i + 2], load(bias.row1 + at));
  });
}

// Masks what the boolean tensor hides.
template <typename C>
__device__ __forceinline__ void mask_allowed(Scores<C>& scores, const FusedParams& params, const MaskPointers& allowed,
                                             int keys, int part, int t) {
  for_elements<C>(params, allowed, keys, part, t, [&](int i, int at) {
    if (allowed.row0[at] == 0) scores[i] = -INFINITY;
    if (allowed.row1[at] == 0) scores[i + 2] = -INFINITY;
  });
}

}  // namespace dspattn::cuda::sm90
