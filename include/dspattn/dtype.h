// Element types of the tensors the library takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dspattn {

enum class DType : std::uint8_t {
  f32,
  f16,
  bf16,
  i32,  // lengths and cumulative lengths
  b8,   // boolean mask: one byte, zero = masked
};

constexpr std::size_t size_bytes(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::b8:
      return 1;
  }
  return 0;
}

constexpr std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "fp32";
    case DType::f16:
      return "fp16";
    case DType::bf16:
      return "bf16";
    case DType::i32:
      return "int32";
    case DType::b8:
      return "bool";
  }
  return "unknown";
}

constexpr bool is_floating(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }

}  // namespace dspattn
