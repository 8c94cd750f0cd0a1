// What the tensor core reads: values of a type, and which of them metadata says were kept.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/half.h"
#include "dspattn/dtype.h"
#include "emulator/machine.h"

namespace dspattn::emulator {

constexpr int bytes_of(DType type) { return type == DType::f32 ? 4 : 2; }

// Element i of a word.
template <DType kType>
float decode_word(std::uint32_t word, int i) {
  if constexpr (kType == DType::f32) {
    return std::bit_cast<float>(word & 0xFFFFE000u);  // tf32: what lies below its mantissa is not read
  }
  const auto bits = static_cast<std::uint16_t>(word >> (16 * i));
  return kType == DType::bf16 ? core::decode_bf16(bits) : core::decode_f16(bits);
}

template <DType kType>
float decode(const std::uint8_t* element) {
  std::uint32_t word = 0;
  std::memcpy(&word, element, kType == DType::f32 ? 4 : 2);
  return decode_word<kType>(word, 0);
}

// The values of a row of A that are multiplied (32 bytes of them), and by which rows of B.
struct RowOfA {
  std::array<float, 16> values;
  std::array<int, 16> k;
};

// Which rows of B a row of a sparse A is multiplied by. Its metadata has four bits for every group of two (tf32) or
// four places: groups 0 to 3 in 16 bits of one lane, 4 to 7 in those of the next.
inline void read_metadata(DType type, std::uint32_t first_half, std::uint32_t second_half, RowOfA& a) {
  for (int group = 0; group < 8; ++group) {
    const std::uint32_t codes = (group < 4 ? first_half : second_half) >> (4 * (group % 4)) & 15;
    if (type == DType::f32) {
      // To the tensor core a tf32 value is two of 16 bits.
      if (codes != 0x4 && codes != 0xE) Machine::fail("metadata that splits a value: " + std::to_string(codes));
      a.k[std::size_t(group)] = 2 * group + (codes == 0xE ? 1 : 0);
    } else {
      const std::uint32_t first = codes & 3, second = codes >> 2;
      if (first >= second) Machine::fail("metadata that does not ascend: " + std::to_string(codes));
      a.k[std::size_t(2 * group)] = 4 * group + static_cast<int>(first);
      a.k[std::size_t(2 * group + 1)] = 4 * group + static_cast<int>(second);
    }
  }
}

}  // namespace dspattn::emulator
