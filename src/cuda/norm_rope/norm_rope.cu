// RMS norm and rotary embedding, one pass over memory. A head's vector of d elements belongs to d / 8 neighbouring
// lanes, eight columns each, so that a sum of squares is a few shuffles; pairs that are turned together lie in one
// thread. A group of lanes takes eight heads of one token: cos, sin and weight stay in registers. Four vectors are in
// flight a thread: by count (2 * 28 MB for each of q and k at 4608 tokens of 24 x 128) nothing but memory limits it.
#include <type_traits>

#include "cuda/device/device.h"
#include "cuda/norm_rope/launch.h"
#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::norm_rope_kernel {
namespace {

constexpr int kRowsAtOnce = 4;
static_assert(kHeadsOfCta % kRowsAtOnce == 0);
constexpr int kPiece = kWidth / 2;  // columns of a thread that lie side by side, whichever pairs

template <DType kType>
inline constexpr int kWords = kType == DType::f32 ? kWidth : kWidth / 2;

// Eight elements as they lie in memory.
template <DType kType>
struct Eight {
  std::uint32_t words[kWords<kType>] = {};
};

template <DType kType>
__device__ __forceinline__ void unpack(const Eight<kType>& from, float (&to)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    if constexpr (kType == DType::f32) {
      to[i] = __uint_as_float(from.words[i]);
      to[i + 1] = __uint_as_float(from.words[i + 1]);
    } else if constexpr (kType == DType::bf16) {
      to[i] = __uint_as_float(from.words[i / 2] << 16);
      to[i + 1] = __uint_as_float(from.words[i / 2] & 0xFFFF0000u);
    } else {
      ptx::unpack_f16x2(from.words[i / 2], to[i], to[i + 1]);
    }
  }
}

template <DType kType>
__device__ __forceinline__ Eight<kType> pack(const float (&from)[kWidth]) {
  Eight<kType> to;
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    if constexpr (kType == DType::f32) {
      to.words[i] = __float_as_uint(from[i]);
      to.words[i + 1] = __float_as_uint(from[i + 1]);
    } else {
      to.words[i / 2] =
          kType == DType::bf16 ? ptx::pack_bf16x2(from[i], from[i + 1]) : ptx::pack_f16x2(from[i], from[i + 1]);
    }
  }
  return to;
}

// The columns of a lane, in any row of d elements: two pieces of four, side by side or d / 2 apart.
template <RopePairs kPairs, bool kVector>
struct Columns {
  static constexpr bool kHalves = kPairs == RopePairs::halves;
  int begin[2];
  int end;  // of the first piece's; the second's, where they are side by side

  __device__ __forceinline__ Columns(int lane, int d)
      : begin{kHalves ? kPiece * lane : kWidth * lane, kHalves ? d / 2 + kPiece * lane : kWidth * lane + kPiece},
        end(kHalves ? d / 2 : d) {}

  __device__ __forceinline__ bool any() const { return begin[0] < end; }
  __device__ __forceinline__ bool has(int i) const { return begin[kHalves ? 0 : i / kPiece] + i % kPiece < end; }
  __device__ __forceinline__ int column(int i) const { return begin[i / kPiece] + i % kPiece; }

  template <DType kType>
  __device__ __forceinline__ Eight<kType> load(const void* row) const {
    using Element = std::conditional_t<kType == DType::f32, std::uint32_t, std::uint16_t>;
    const auto* elements = static_cast<const Element*>(row);
    Eight<kType> x;
    if constexpr (!kVector) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const std::uint32_t bits = has(i) ? elements[column(i)] : 0;
        if constexpr (kType == DType::f32)
          x.words[i] = bits;
        else
          x.words[i / 2] |= bits << (16 * (i % 2));
      }
    } else if constexpr (kType == DType::f32) {
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const uint4 four = *reinterpret_cast<const uint4*>(elements + begin[piece]);
        x.words[4 * piece] = four.x, x.words[4 * piece + 1] = four.y;
        x.words[4 * piece + 2] = four.z, x.words[4 * piece + 3] = four.w;
      }
    } else if constexpr (kHalves) {
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const uint2 four = *reinterpret_cast<const uint2*>(elements + begin[piece]);
        x.words[2 * piece] = four.x, x.words[2 * piece + 1] = four.y;
      }
    } else {
      const uint4 eight = *reinterpret_cast<const uint4*>(elements + begin[0]);
      x.words[0] = eight.x, x.words[1] = eight.y, x.words[2] = eight.z, x.words[3] = eight.w;
    }
    return x;
  }

  template <DType kType>
  __device__ __forceinline__ void store(void* row, const Eight<kType>& x) const {
    using Element = std::conditional_t<kType == DType::f32, std::uint32_t, std::uint16_t>;
    auto* elements = static_cast<Element*>(row);
    if constexpr (!kVector) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const std::uint32_t bits = kType == DType::f32 ? x.words[i % kWords<kType>] : x.words[i / 2] >> (16 * (i % 2));
        if (has(i)) elements[column(i)] = static_cast<Element>(bits);
      }
    } else if constexpr (kType == DType::f32) {
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        *reinterpret_cast<uint4*>(elements + begin[piece]) =
            make_uint4(x.words[4 * piece], x.words[4 * piece + 1], x.words[4 * piece + 2], x.words[4 * piece + 3]);
      }
    } else if constexpr (kHalves) {
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        uint2 four;
        four.x = x.words[2 * piece], four.y = x.words[2 * piece + 1];
        *reinterpret_cast<uint2*>(elements + begin[piece]) = four;
      }
    } else {
      *reinterpret_cast<uint4*>(elements + begin[0]) = make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]);
    }
  }
};

// What a CTA does: blocks of tokens and heads of one sequence of one part.
struct Place {
  int part = 0, batch, token, head, head_end;

  __device__ __forceinline__ Place(const Params& p, int cta) {
    while (part + 1 < p.part_count && cta >= p.parts[part + 1].first_cta) ++part;
    const Part& own_part = p.parts[part];
    const int index = cta - own_part.first_cta;
    const int tokens = index / own_part.head_blocks;  // CTAs beside each other take neighbouring heads
    head = index % own_part.head_blocks * kHeadsOfCta;
    head_end = min(head + kHeadsOfCta, own_part.heads);
    batch = tokens / own_part.token_blocks;
    token = tokens % own_part.token_blocks * (kThreads / p.lanes);
  }
};

// By all lanes of the vectors, and by whole warps: 1 / sqrt(mean(x^2) + eps) of each.
template <DType kType>
__device__ __forceinline__ void find_factors(const Params& p, const Eight<kType> (&rows)[kRowsAtOnce],
                                             float (&factors)[kRowsAtOnce]) {
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    float x[kWidth];
    unpack<kType>(rows[i], x);
    factors[i] = 0;
#pragma unroll
    for (const float value : x) factors[i] += value * value;
  }
  for (int with = p.lanes / 2; with > 0; with /= 2) {
#pragma unroll
    for (float& sum : factors) sum += __shfl_xor_sync(~0u, sum, with);
  }
#pragma unroll
  for (float& sum : factors) sum = ptx::rsqrt_fast(sum * p.inverse_d + p.eps);
}

// Products and sums are not contracted: roundings are those of separate operators.
template <RopePairs kPairs>
__device__ __forceinline__ void turn(const float (&cos)[kWidth], const float (&sin)[kWidth], float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) {
    const int a = kPairs == RopePairs::halves ? i : 2 * i, b = kPairs == RopePairs::halves ? i + kPiece : 2 * i + 1;
    const float x_a = x[a], x_b = x[b];
    x[a] = __fsub_rn(__fmul_rn(x_a, cos[a]), __fmul_rn(x_b, sin[a]));
    x[b] = __fadd_rn(__fmul_rn(x_b, cos[b]), __fmul_rn(x_a, sin[b]));
  }
}

// With 64 registers a fourth CTA fits (35.1 against 37.2 us at Flux's shape); other types and single elements need
// more.
template <DType kType, bool kVector>
inline constexpr int kCtasAtOnce = kVector&& kType == DType::bf16 ? 4 : 2;

template <DType kType, RopePairs kPairs, bool kVector>
__global__ void __launch_bounds__(kThreads, kCtasAtOnce<kType, kVector>)
    norm_rope_kernel(const __grid_constant__ Params p) {
  const Place place(p, static_cast<int>(blockIdx.x));
  const Part& part = p.parts[place.part];
  const int thread = static_cast<int>(threadIdx.x);
  const Columns<kPairs, kVector> columns(thread % p.lanes, p.d);
  const int token = place.token + thread / p.lanes;
  const bool active = token < part.tokens && columns.any();  // the others come to shuffles, with zeros

  float weight[kWidth], cos[kWidth] = {}, sin[kWidth] = {};
#pragma unroll
  for (float& factor : weight) factor = 1;
  if (active && part.weight != nullptr) unpack<kType>(columns.template load<kType>(part.weight), weight);
  if (active && p.cos.data != nullptr) {
    const std::int64_t position = part.first_position + token;
    unpack<DType::f32>(columns.template load<DType::f32>(p.cos.data + position * p.cos.stride), cos);
    unpack<DType::f32>(columns.template load<DType::f32>(p.sin.data + position * p.sin.stride), sin);
  }
  constexpr int kBytes = kType == DType::f32 ? 4 : 2;
  const auto* x = static_cast<const char*>(part.x.data) + part.x.offset(place.batch, token, 0) * kBytes;
  auto* out = static_cast<char*>(part.out.data) + part.out.offset(place.batch, token, 0) * kBytes;
#pragma unroll 1
  for (int head = place.head; head < place.head_end; head += kRowsAtOnce) {
    Eight<kType> rows[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (active && head + i < place.head_end) {
        rows[i] = columns.template load<kType>(x + (head + i) * part.x.head_stride * kBytes);
      }
    }
    float factors[kRowsAtOnce];
    if (p.norm != 0) find_factors<kType>(p, rows, factors);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      float y[kWidth];
      unpack<kType>(rows[i], y);
      if (p.norm != 0) {
#pragma unroll
        for (int c = 0; c < kWidth; ++c) y[c] = y[c] * factors[i] * weight[c];
        if (p.cos.data != nullptr) unpack<kType>(pack<kType>(y), y);
      }
      if (p.cos.data != nullptr) turn<kPairs>(cos, sin, y);
      if (active && head + i < place.head_end) {
        columns.template store<kType>(out + (head + i) * part.out.head_stride * kBytes, pack<kType>(y));
      }
    }
  }
}

template <DType kType, RopePairs kPairs>
void launch_of(const Plan& plan, cudaStream_t stream) {
  const LaunchShape shape{.ctas = grid_of(plan.ctas), .threads = kThreads};
  const auto kernel = plan.vector ? norm_rope_kernel<kType, kPairs, true> : norm_rope_kernel<kType, kPairs, false>;
  launch("norm and rotation", kernel, shape, stream, plan.params);
}

template <DType kType>
void launch_of(const Plan& plan, cudaStream_t stream) {
  plan.pairs == RopePairs::halves ? launch_of<kType, RopePairs::halves>(plan, stream)
                                  : launch_of<kType, RopePairs::neighbours>(plan, stream);
}

}  // namespace

void launch_norm_rope(const Plan& plan, cudaStream_t stream) {
  switch (plan.type) {
    case DType::bf16:
      return launch_of<DType::bf16>(plan, stream);
    case DType::f16:
      return launch_of<DType::f16>(plan, stream);
    default:
      return launch_of<DType::f32>(plan, stream);
  }
}

}  // namespace dspattn::cuda::norm_rope_kernel
