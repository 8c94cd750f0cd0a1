// How a call of norm_rope is split over CTAs: parameters of the kernel, computed without a GPU.
#pragma once

#include <cstdint>

#include "dspattn/norm_rope.h"
#include "dspattn/pattern.h"

namespace dspattn::cuda::norm_rope_kernel {

inline constexpr int kThreads = 256;
inline constexpr int kWidth = 8;       // columns of a thread: 16 bytes of 16-bit numbers
inline constexpr int kHeadsOfCta = 8;  // of each of its tokens, by the same threads: they read cos and sin once
static_assert(kMaxNormRopeDim <= 32 * kWidth, "a head's vector is one warp's at most");

// [batch, tokens, heads, d], strides in elements.
struct HeadsView {
  void* data = nullptr;
  std::int64_t batch_stride = 0, token_stride = 0, head_stride = 0;

  DSPATTN_HOST_DEVICE constexpr std::int64_t offset(int batch, int token, int head) const {
    return batch * batch_stride + token * token_stride + head * head_stride;
  }
};

struct Part {
  HeadsView x, out;
  const void* weight = nullptr;  // [d]; null: 1
  int tokens = 0, heads = 0;
  int token_blocks = 0, head_blocks = 0;  // CTAs of a sequence: one for each pair
  std::int64_t first_position = 0;
  int first_cta = 0;
};

// [positions, d] fp32.
struct AnglesView {
  const float* data = nullptr;  // null: no rotation
  std::int64_t stride = 0;
};

struct Params {
  Part parts[kMaxNormRopeParts];
  AnglesView cos, sin;
  int part_count = 0;
  int d = 0;
  int lanes = 0;  // of a head's vector: a power of two
  int norm = 0;   // 1: with a norm
  float inverse_d = 0, eps = 0;
};

struct Plan {
  Params params;
  DType type = DType::bf16;
  RopePairs pairs = RopePairs::neighbours;
  bool vector = false;    // every access is of 8 or 16 bytes
  std::int64_t ctas = 0;  // 0: there is nothing to do
};

// Of arguments that have been checked.
Plan plan_of(const NormRopeArgs& args);

}  // namespace dspattn::cuda::norm_rope_kernel
