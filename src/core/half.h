// fp16 and bf16 on the host: conversion to and from wider types, and element access through a DType.
//
// Encoding starts from double and rounds once, to nearest even; float widens to double exactly, so it needs no path of
// its own. These are the readable conversions of the oracle, the tests and file input; fast kernels use vector units.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "dspattn/dtype.h"

namespace dspattn::core {

inline constexpr double kMaxF16 = 65504.0;  // (2 - 2^-10) * 2^15

namespace half_detail {

// A 16-bit IEEE-like format: sign, exponent bits, mantissa bits; 1 + exponent_bits + mantissa_bits == 16.
struct Format {
  int exponent_bits;
  int mantissa_bits;

  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  constexpr std::uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
};

inline constexpr Format kF16{5, 10};
inline constexpr Format kBf16{8, 7};

template <Format kFormat>
constexpr std::uint16_t encode(double value) {
  constexpr int kDoubleMantissaBits = 52;
  constexpr int kDoubleBias = 1023;
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(value);
  const std::uint32_t sign = static_cast<std::uint32_t>(bits >> 63) << 15;
  const std::uint64_t fraction = bits & ((std::uint64_t{1} << kDoubleMantissaBits) - 1);
  const int exponent_field = static_cast<int>((bits >> kDoubleMantissaBits) & 0x7ff);

  if (exponent_field == 0x7ff) {
    const std::uint32_t quiet = fraction != 0 ? 1u << (kFormat.mantissa_bits - 1) : 0u;
    return static_cast<std::uint16_t>(sign | kFormat.infinity() | quiet);
  }
  if (exponent_field == 0) return static_cast<std::uint16_t>(sign);  // far below half the smallest subnormal

  const int exponent = exponent_field - kDoubleBias;
  const int smallest_normal = 1 - kFormat.bias();
  const bool subnormal = exponent < smallest_normal;
  // How many low bits of the 53-bit significand are rounded away.
  const int dropped = kDoubleMantissaBits - kFormat.mantissa_bits + (subnormal ? smallest_normal - exponent : 0);
  if (dropped > kDoubleMantissaBits + 1) return static_cast<std::uint16_t>(sign);  // below half the smallest subnormal
  const std::uint64_t significand = fraction | (std::uint64_t{1} << kDoubleMantissaBits);
  const std::uint64_t half = std::uint64_t{1} << (dropped - 1);
  const std::uint64_t kept = (significand + half - 1 + (significand >> dropped & 1)) >> dropped;  // ties to even

  // The implicit leading one is added into the exponent field, so a carry out of the mantissa raises the exponent.
  const std::uint64_t base =
      subnormal ? 0 : static_cast<std::uint64_t>(exponent + kFormat.bias() - 1) << kFormat.mantissa_bits;
  const std::uint64_t magnitude = base + kept;
  if (magnitude >= kFormat.infinity()) return static_cast<std::uint16_t>(sign | kFormat.infinity());
  return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(magnitude));
}

}  // namespace half_detail

constexpr std::uint16_t encode_f16(double value) { return half_detail::encode<half_detail::kF16>(value); }
constexpr std::uint16_t encode_bf16(double value) { return half_detail::encode<half_detail::kBf16>(value); }

constexpr float decode_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

constexpr float decode_f16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 127 - 15) << 23) | (mantissa << 13));
}

constexpr double round_to_f16(double value) { return decode_f16(encode_f16(value)); }

// The nearest value of the type; of the integer types, `value` must be one of theirs.
inline double round_to(DType dtype, double value) {
  switch (dtype) {
    case DType::f32:
      return static_cast<double>(static_cast<float>(value));
    case DType::f16:
      return decode_f16(encode_f16(value));
    case DType::bf16:
      return decode_bf16(encode_bf16(value));
    case DType::i32:
    case DType::b8:
      return value;
  }
  return value;
}

// Distance from 1 to the next larger value of a floating type.
constexpr double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 0x1p-10;
    case DType::bf16:
      return 0x1p-7;
    default:
      return static_cast<double>(std::numeric_limits<float>::epsilon());
  }
}

// The largest finite value of a floating type.
constexpr double largest_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return kMaxF16;
    case DType::bf16:
      return 0x1.fep127;
    default:
      return static_cast<double>(std::numeric_limits<float>::max());
  }
}

namespace half_detail {

template <typename Element>
Element read(const void* data, std::int64_t index) {
  Element element;
  std::memcpy(&element, static_cast<const char*>(data) + index * static_cast<std::int64_t>(sizeof(Element)),
              sizeof(Element));
  return element;
}

template <typename Element>
void write(void* data, std::int64_t index, Element element) {
  std::memcpy(static_cast<char*>(data) + index * static_cast<std::int64_t>(sizeof(Element)), &element, sizeof(Element));
}

}  // namespace half_detail

// Element `index` (counted in elements) of memory that holds values of type dtype.
inline double load_element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f32:
      return static_cast<double>(half_detail::read<float>(data, index));
    case DType::f16:
      return decode_f16(half_detail::read<std::uint16_t>(data, index));
    case DType::bf16:
      return decode_bf16(half_detail::read<std::uint16_t>(data, index));
    case DType::i32:
      return half_detail::read<std::int32_t>(data, index);
    case DType::b8:
      return half_detail::read<std::uint8_t>(data, index) != 0 ? 1.0 : 0.0;
  }
  return 0.0;
}

inline void store_element(void* data, DType dtype, std::int64_t index, double value) {
  switch (dtype) {
    case DType::f32:
      half_detail::write(data, index, static_cast<float>(value));
      return;
    case DType::f16:
      half_detail::write(data, index, encode_f16(value));
      return;
    case DType::bf16:
      half_detail::write(data, index, encode_bf16(value));
      return;
    case DType::i32:
      half_detail::write(data, index, static_cast<std::int32_t>(value));
      return;
    case DType::b8:
      half_detail::write(data, index, static_cast<std::uint8_t>(value != 0.0 ? 1 : 0));
      return;
  }
}

}  // namespace dspattn::core
