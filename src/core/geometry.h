// The sizes of a validated problem, resolved once, and the part of a row that causal masks, windows and key lengths
// leave visible. Shared by every fast backend; the oracle works from the contract alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dspattn/attention.h"

namespace dspattn::core {

// No bound: far beyond any key index, and safe to add to one.
inline constexpr std::int64_t kUnbounded = std::int64_t{1} << 40;
// Largest Mask::offset either way: a position still lies within kUnbounded of every key.
inline constexpr std::int64_t kMaxOffset = kUnbounded / 2;

// Keys of a block whose values a mean is made of (rest = mean).
inline constexpr std::int64_t kMeanBlock = 128;

struct Geometry {
  std::int64_t batch = 0;  // sequences (of a packed batch: the number of sequences)
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t n_q = 0;  // of a packed batch an upper bound of its lengths, never above the rows there are
  std::int64_t n_k = 0;
  std::int64_t d = 0;
  std::int64_t d_v = 0;
  double scale = 0;
  bool packed = false;
};

Geometry geometry_of(const Problem& problem);

// Keys [begin, end) of a row; begin == end when the row sees none.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// The diagonal part of a mask with its options resolved to numbers: query i may see keys
// [i + diagonal - left, i + diagonal + right], the diagonal being offset, or offset + n_k - n_q.
struct Band {
  std::int64_t left = kUnbounded;
  std::int64_t right = kUnbounded;
  bool bottom_right = true;
  std::int64_t offset = 0;

  DSPATTN_HOST_DEVICE constexpr KeyRange row(std::int64_t i, std::int64_t n_q, std::int64_t n_k,
                                             std::int64_t key_length) const {
    const std::int64_t position = (bottom_right ? i + n_k - n_q : i) + offset;
    std::int64_t begin = position - left;
    if (begin < 0) begin = 0;
    std::int64_t end = position + right + 1;
    if (end > n_k) end = n_k;
    if (end > key_length) end = key_length;
    if (end < begin) end = begin;
    return {begin, end};
  }
};

Band band_of(const Mask& mask);

// The scales that are served: those for which the scale, its inverse and what is made of them (times log2 e, as a power
// of two) are normal fp32 numbers.
inline constexpr double kLeastScale = 0x1p-126;
inline constexpr double kLargestScale = 0x1p126;

// 2^-e of the contract: the largest power of two not above scale. 16-bit inputs compare q.k * this, rounded to fp16.
double selection_scale(double scale);

// Whether 2^-e of a served scale is a normal number of the type: fp16 holds 2^-14 to 2^15, fp32 and bf16 all of them.
// For kernels that multiply their inputs by it.
bool selection_scale_fits(DType dtype, double scale);

}  // namespace dspattn::core
