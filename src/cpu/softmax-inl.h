// Online softmax over the slots of a tile, in powers of two, and dropout of its weights.
#if defined(DSPATTN_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSPATTN_CPU_SOFTMAX_INL_H_
#undef DSPATTN_CPU_SOFTMAX_INL_H_
#else
#define DSPATTN_CPU_SOFTMAX_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <limits>

#include "cpu/job.h"
#include "cpu/load-inl.h"
#include "cpu/select-inl.h"
#include "cpu/tile.h"

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {

// 2^(t * c) for t * c <= 0 (a little above is fine), and 2^-126 where it would be less: beside a largest weight of 1
// that is nothing. The polynomial is the minimax one of degree 6 for 2^f on [-1/2, 1/2], relative error 1.9e-9 before
// rounding (Remez). NaN gives no meaningful value: callers flag such rows.
struct Exp2 {
  VecF c, least;

  explicit Exp2(float factor)
      : c(hn::Set(kF32, factor)),
        least(hn::Set(kF32, std::max(-126.0f / factor, std::numeric_limits<float>::lowest()))) {}

  VecF operator()(VecF t) const {
    VecF one[1] = {t};
    (*this)(one);
    return one[0];
  }

  // Several at once, each in its place: the chain of multiply-adds is long, and a core works on one while another
  // waits.
  template <int kCount>
  HWY_INLINE void operator()(VecF (&t)[kCount]) const {
    constexpr float kCoefficients[] = {0.0013399930903688073f, 0.009618489071726799f, 0.05550328642129898f,
                                       0.24022646248340607f,   0.6931471824645996f,   1.0f};
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const VecF magic = hn::Set(kF32, 12582912.0f), highest = hn::Set(kF32, 0.0001534581242594868f);
    VecF f[kCount], p[kCount];
    VecI exponent[kCount];
    HWY_UNROLL(8)
    for (int i = 0; i < kCount; ++i) {
      const VecF x = hn::Max(t[i], least);
      const VecF shifted = hn::MulAdd(x, c, magic);
      f[i] = hn::MulAdd(x, c, hn::Sub(magic, shifted));
      exponent[i] = hn::ShiftLeft<23>(hn::BitCast(kI32, shifted));
      p[i] = highest;
    }
    HWY_UNROLL(8)
    for (const float coefficient : kCoefficients) {
      const VecF next = hn::Set(kF32, coefficient);
      HWY_UNROLL(8)
      for (int i = 0; i < kCount; ++i) p[i] = hn::MulAdd(p[i], f[i], next);
    }
    HWY_UNROLL(8)
    for (int i = 0; i < kCount; ++i) t[i] = hn::BitCast(kF32, hn::Add(hn::BitCast(kI32, p[i]), exponent[i]));
  }
};

// What a row carries from block to block.
struct RunningRows {
  float* largest = nullptr;  // [kTileQ], -inf before the first key
  float* sum = nullptr;      // [kTileQ] of exponentials relative to `largest`
};

// Turns the slots' scores into weights relative to the new running maximum. rescale[row] is what the row's earlier sum
// and output have to be multiplied with.
inline void weigh(Slots& slots, float scale_log2, const RunningRows& running, float* rescale) {
  const Exp2 exp2(scale_log2);
  const int count = slots.count;
  const bool masked = slots.masked;
  for (int v = 0; v < kVecsQ; ++v) {
    const int row = v * kLanes;
    const VecF before = hn::Load(kF32, running.largest + row);
    const VecF largest = hn::Max(before, hn::Load(kF32, slots.row_max + row));
    // A row without a key so far has no maximum to subtract; -inf minus -inf would be NaN.
    const VecF origin = hn::IfThenElse(hn::Eq(largest, minus_infinity()), hn::Zero(kF32), largest);
    const VecF factor = exp2(hn::Sub(before, origin));
    VecF sum = hn::Mul(hn::Load(kF32, running.sum + row), factor);
    const auto weigh_slots = [&](int first, auto& weight) HWY_ATTR {
      constexpr int kCount = sizeof(weight) / sizeof(weight[0]);
      for (int i = 0; i < kCount; ++i) weight[i] = hn::Sub(hn::Load(kF32, &slots.value.at[first + i][row]), origin);
      exp2(weight);
      for (int i = 0; i < kCount; ++i) {
        float* place = &slots.value.at[first + i][row];
        if (masked) weight[i] = hn::IfThenZeroElse(hn::Eq(hn::Load(kF32, place), minus_infinity()), weight[i]);
        hn::Store(weight[i], kF32, place);
        sum = hn::Add(sum, weight[i]);
      }
    };
    int s = 0;
    for (; s + 4 <= count; s += 4) {
      VecF weights[4];
      weigh_slots(s, weights);
    }
    for (; s < count; ++s) {
      VecF weights[1];
      weigh_slots(s, weights);
    }
    hn::Store(largest, kF32, running.largest + row);
    hn::Store(sum, kF32, running.sum + row);
    hn::Store(factor, kF32, rescale + row);
  }
}

// What dropout makes of weights, a vector of rows at a time: 0, or 1 / (1 - probability). The same bits as
// core::DropoutRow::bits, which see.
struct DropoutFactors {
  hn::Vec<U32> threshold;
  VecF kept;

  explicit DropoutFactors(const DropoutJob& dropout)
      : threshold(hn::Set(U32(), dropout.threshold)), kept(hn::Set(kF32, dropout.kept_factor)) {}

  VecF operator()(hn::Vec<U32> row_states, hn::Vec<U32> keys) const {
    const U32 du;
    auto x = hn::Add(row_states, hn::Mul(keys, hn::Set(du, 0x9E3779B9u)));
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(du, 0x7FEB352Du));
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(du, 0x846CA68Bu));
    x = hn::Xor(x, hn::ShiftRight<16>(x));
    return hn::IfThenZeroElse(hn::RebindMask(kF32, hn::Lt(x, threshold)), kept);
  }
};

// Drops weights of the slots, after their sum was made.
inline void drop_slots(const DropoutJob& dropout, const TileRows& tile, std::int64_t block, int width, Slots& slots) {
  const U32 du;
  const DropoutFactors factors(dropout);
  const hn::Rebind<std::uint16_t, U32> narrow;
  int log2_width = 0;
  while ((1 << log2_width) < width) ++log2_width;
  const auto first = hn::Set(du, static_cast<std::uint32_t>(block));
  for (int s = 0; s < slots.count; ++s) {
    for (int v = 0; v < kVecsQ; ++v) {
      const int row = v * kLanes;
      const auto key = hn::ShiftRightSame(hn::PromoteTo(du, hn::Load(narrow, &slots.offset[s][row])), log2_width);
      const VecF factor = factors(hn::LoadU(du, tile.dropout + row), hn::Add(first, key));
      float* weight = &slots.value.at[s][row];
      hn::Store(hn::Mul(hn::Load(kF32, weight), factor), kF32, weight);
    }
  }
}

}  // namespace dspattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
