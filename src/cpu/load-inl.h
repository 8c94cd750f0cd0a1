// Moving rows between the caller's tensors and fp32 buffers: widening, transposing, narrowing.
#if defined(DSPATTN_CPU_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSPATTN_CPU_LOAD_INL_H_
#undef DSPATTN_CPU_LOAD_INL_H_
#else
#define DSPATTN_CPU_LOAD_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "cpu/simd.h"
#include "cpu/tile.h"
#include "dspattn/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most kPad lanes, so that padded columns are whole vectors.
using F32 = hn::CappedTag<float, kPad>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using VecF = hn::Vec<F32>;
using VecI = hn::Vec<I32>;
using MaskF = hn::Mask<F32>;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));
inline constexpr int kVecsQ = kTileQ / kLanes;  // vectors that hold the rows of a tile
inline constexpr F32 kF32{};
inline constexpr I32 kI32{};

// bf16 is the upper half of fp32.
inline VecF widen_bf16(hn::Vec<U32> bits) { return hn::BitCast(kF32, hn::ShiftLeft<16>(bits)); }

// fp16 by arithmetic: the fields moved to their places in fp32 are the number times 2^-112, subnormal ones too; an
// exponent of all ones stays one.
inline VecF widen_f16(hn::Vec<U32> bits) {
  const U32 du;
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffu));
  const VecF finite = hn::Mul(hn::BitCast(kF32, hn::ShiftLeft<13>(magnitude)), hn::Set(kF32, 0x1p112f));
  const auto special = hn::Gt(hn::BitCast(kI32, magnitude), hn::Set(kI32, 0x7bff));
  const auto exponent = hn::IfThenElseZero(hn::RebindMask(du, special), hn::Set(du, 0x7f800000u));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000u)));
  return hn::BitCast(kF32, hn::Or(hn::Or(hn::BitCast(du, finite), exponent), sign));
}

// `count` elements widened to fp32, and zeros up to a multiple of kPad. Reads nothing past `count`.
inline void widen_row(const void* source, DType dtype, int count, float* HWY_RESTRICT row) {
  const int padded = static_cast<int>(round_up(count, kPad));
  if (dtype == DType::f32) {
    std::memcpy(row, source, static_cast<std::size_t>(count) * sizeof(float));
    for (int x = count; x < padded; ++x) row[x] = 0.0f;
    return;
  }
  const auto widen = [&](auto narrow, auto* typed, auto convert) HWY_ATTR {
    const int whole = count / kLanes * kLanes;
    int x = 0;
    for (; x < whole; x += kLanes) hn::Store(convert(hn::LoadU(narrow, typed + x)), kF32, row + x);
    if (x < count) {
      HWY_ALIGN std::remove_cv_t<std::remove_pointer_t<decltype(typed)> > tail[kPad] = {};
      std::memcpy(tail, typed + x, static_cast<std::size_t>(count - x) * sizeof(*typed));
      hn::Store(convert(hn::Load(narrow, tail)), kF32, row + x);
      x += kLanes;
    }
    for (; x < padded; x += kLanes) hn::Store(hn::Zero(kF32), kF32, row + x);
  };
  const auto* bits = static_cast<const std::uint16_t*>(source);
  const hn::Rebind<std::uint16_t, F32> narrow;
  if (dtype == DType::bf16) {
    widen(narrow, bits, [](auto value) HWY_ATTR { return widen_bf16(hn::PromoteTo(U32(), value)); });
    return;
  }
#if DSPATTN_CONVERTS_F16
  widen(hn::Rebind<hwy::float16_t, F32>(), static_cast<const hwy::float16_t*>(source),
        [](auto value) HWY_ATTR { return hn::PromoteTo(kF32, value); });
#else
  widen(narrow, bits, [](auto value) HWY_ATTR { return widen_f16(hn::PromoteTo(U32(), value)); });
#endif
}

// Nearest-even bf16 in the low half of each lane. NaN stays NaN (made quiet, so that the rounding cannot carry out).
inline hn::Vec<U32> bf16_bits(VecF value) {
  const U32 du;
  const auto bits = hn::BitCast(du, value);
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u)));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
  return hn::ShiftRight<16>(hn::IfThenElse(is_nan, hn::Or(bits, hn::Set(du, 0x400000u)), rounded));
}

// Nearest-even fp16 in the low half of each lane, in integer arithmetic: Highway's own narrowing rounds differently on
// targets without the instruction.
inline hn::Vec<U32> f16_bits(VecF value) {
  const U32 du;
  const auto bits = hn::BitCast(du, value);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000u));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
  // Normal results: move the exponent from bias 127 to 15 and round away 13 bits.
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, odd), hn::Set(du, 0xfffu - (112u << 23))));
  // Below 2^-14 the quantum is fixed at 2^-24, which is the quantum of floats in [1/2, 1): adding 1/2 rounds to it.
  const auto half = hn::Set(kF32, 0.5f);
  const auto subnormal = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(kF32, magnitude), half)), hn::BitCast(du, half));
  const auto is_subnormal = hn::Lt(hn::BitCast(kI32, magnitude), hn::Set(kI32, 113 << 23));
  auto result = hn::IfThenElse(hn::RebindMask(du, is_subnormal), subnormal, normal);
  // From 65520 on the nearest is infinity.
  const auto overflows = hn::Ge(hn::BitCast(kF32, magnitude), hn::Set(kF32, 65520.0f));
  result = hn::IfThenElse(hn::RebindMask(du, overflows), hn::Set(du, 0x7c00u), result);
  result = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), hn::Set(du, 0x7e00u), result);
  return hn::Or(result, sign);
}

// row[x] * factor for x < count, narrowed to the destination's type. `row` is padded to whole vectors.
inline void narrow_row(const float* HWY_RESTRICT row, float factor, DType dtype, int count, void* destination) {
  const auto scale = hn::Set(kF32, factor);
  if (dtype == DType::f32) {
    float* out = static_cast<float*>(destination);
    int x = 0;
    for (; x + kLanes <= count; x += kLanes) hn::StoreU(hn::Mul(hn::Load(kF32, row + x), scale), kF32, out + x);
    for (; x < count; ++x) out[x] = row[x] * factor;
    return;
  }
  HWY_ALIGN std::uint32_t bits[kPad];
  std::uint16_t* out = static_cast<std::uint16_t*>(destination);
  for (int x = 0; x < count; x += kLanes) {
    const VecF value = hn::Mul(hn::Load(kF32, row + x), scale);
    hn::Store(dtype == DType::bf16 ? bf16_bits(value) : f16_bits(value), U32(), bits);
    const int lanes = count - x < kLanes ? count - x : kLanes;
    for (int lane = 0; lane < lanes; ++lane) out[x + lane] = static_cast<std::uint16_t>(bits[lane]);
  }
}

// kTileQ rows -> packed [columns][kTileQ], in blocks of 4 x 4: rows must be readable, and packed writable, up to a
// multiple of 4 columns.
inline void transpose_tile(const float* const* rows, int columns, float* HWY_RESTRICT packed) {
#if HWY_TARGET == HWY_SCALAR
  for (int x = 0; x < columns; ++x) {
    for (int r = 0; r < kTileQ; ++r) packed[x * kTileQ + r] = rows[r][x];
  }
#else
  const hn::FixedTag<float, 4> d4;
  const hn::FixedTag<double, 2> d2;
  const auto upper = [&](auto a, auto b) HWY_ATTR {
    return hn::BitCast(d4, hn::InterleaveUpper(d2, hn::BitCast(d2, a), hn::BitCast(d2, b)));
  };
  const auto lower = [&](auto a, auto b) HWY_ATTR {
    return hn::BitCast(d4, hn::InterleaveLower(d2, hn::BitCast(d2, a), hn::BitCast(d2, b)));
  };
  for (int x = 0; x < columns; x += 4) {
    for (int r = 0; r < kTileQ; r += 4) {
      const auto r0 = hn::LoadU(d4, rows[r] + x), r1 = hn::LoadU(d4, rows[r + 1] + x);
      const auto r2 = hn::LoadU(d4, rows[r + 2] + x), r3 = hn::LoadU(d4, rows[r + 3] + x);
      const auto low01 = hn::InterleaveLower(d4, r0, r1), high01 = hn::InterleaveUpper(d4, r0, r1);
      const auto low23 = hn::InterleaveLower(d4, r2, r3), high23 = hn::InterleaveUpper(d4, r2, r3);
      float* to = packed + x * kTileQ + r;
      hn::Store(lower(low01, low23), d4, to);
      hn::Store(upper(low01, low23), d4, to + kTileQ);
      hn::Store(lower(high01, high23), d4, to + 2 * kTileQ);
      hn::Store(upper(high01, high23), d4, to + 3 * kTileQ);
    }
  }
#endif
}

// `keys` rows of a tensor into panels; zeros for the zero row and for the keys that complete the last kKeysTogether, as
// products take that many at a time. Rows beyond are left alone: no slot points there. `row` is a buffer of
// shape.padded floats.
inline void fill_panels(const unsigned char* source, DType dtype, std::int64_t stride_bytes, int keys,
                        const PanelShape& shape, float* HWY_RESTRICT row, float* HWY_RESTRICT panels) {
  const std::size_t width = static_cast<std::size_t>(shape.width);
  const int zeros_end = static_cast<int>(round_up(keys, kKeysTogether));
  for (int key = 0; key <= kTileK; ++key) {
    if (key == zeros_end) key = kTileK;
    if (key < keys) {
      widen_row(source + key * stride_bytes, dtype, shape.columns,
                shape.panels == 1 ? panels + key * shape.width : row);
      if (shape.panels == 1) continue;
    }
    for (int p = 0; p < shape.panels; ++p) {
      float* to = panels + static_cast<std::size_t>(p) * shape.panel_elems() + static_cast<std::size_t>(key) * width;
      const std::size_t bytes = static_cast<std::size_t>(shape.columns_of(p)) * sizeof(float);
      if (key < keys) {
        std::memcpy(to, row + p * shape.width, bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    }
  }
}

// Asks for the rows [begin, end) of `count` elements, so that they are near when fill_panels reads them.
inline void prefetch_rows(const unsigned char* source, DType dtype, std::int64_t stride_bytes, std::int64_t begin,
                          std::int64_t end, int count) {
  constexpr std::int64_t kLine = 64;
  const std::int64_t bytes = count * static_cast<std::int64_t>(size_bytes(dtype));
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t at = 0; at < bytes; at += kLine) hwy::Prefetch(source + row * stride_bytes + at);
  }
}

}  // namespace dspattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
