// What transformers do to queries and keys before attention, in one pass over memory: RMS norm of each head's vector,
// rotary embedding, and joining of several parts (text and image) into one sequence.
//
//   dspattn::NormRopeArgs args;
//   args.parts = {{text_q, text_weight, joined_q_of_text, 0}, {image_q, image_weight, joined_q_of_image, 512}};
//   args.eps = 1e-6;                    // without: no norm
//   args.cos = {cos, dspattn::DType::f32, {n, d}};  // and args.sin; without: no rotation
//   dspattn::norm_rope(args);
//
// A vector x of d elements becomes y = x / sqrt(mean(x^2) + eps) * weight, then z. Columns a < b that are turned
// together: z_a = y_a cos_a - y_b sin_a, z_b = y_b cos_b + y_a sin_b, with the cos and sin of its position. Arithmetic
// is in fp32; y is rounded to the type of x where both are asked for, and so is the result: the roundings that the two
// have as operators of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "dspattn/attention.h"
#include "dspattn/error.h"
#include "dspattn/tensor_view.h"

namespace dspattn {

// Which columns are turned together.
enum class RopePairs : std::uint8_t {
  neighbours,  // 2i and 2i + 1
  halves,      // i and i + d/2
};

struct NormRopePart {
  ConstTensorView x;                // [batch, n, heads, d]; columns contiguous, other strides any
  ConstTensorView weight;           // [d], in x's type; optional, and only with eps
  TensorView out;                   // as x; a slice of a longer sequence perhaps. Shares no memory with any x
  std::int64_t first_position = 0;  // row of cos and sin of the part's first token
};

inline constexpr int kMaxNormRopeParts = 8;
inline constexpr std::int64_t kMaxNormRopeDim = 256;  // d

struct NormRopeArgs {
  Device device;
  std::vector<NormRopePart> parts;  // of one type, batch and d; n and heads of each may differ
  std::optional<double> eps;        // of the norm; none: no norm
  ConstTensorView cos, sin;         // fp32 [positions, d]; both, or neither: no rotation
  RopePairs pairs = RopePairs::neighbours;
  Execution run;  // its stream, or its threads and team
};

// One launch for all parts. GPU work is enqueued on the stream and not waited for. Throws Error.
void norm_rope(const NormRopeArgs& args);

}  // namespace dspattn
