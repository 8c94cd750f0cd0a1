// fp16 and bf16 conversions, over all 65536 encodings and the midpoints between neighbours.
#include "core/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace dspattn::core {
namespace {

struct Codec {
  const char* name;
  std::uint16_t (*encode)(double);
  float (*decode)(std::uint16_t);
  int mantissa_bits;
  int bias;
};

const Codec kCodecs[] = {{"fp16", encode_f16, decode_f16, 10, 15}, {"bf16", encode_bf16, decode_bf16, 7, 127}};

// The value of an encoding from the definition of the format, by ldexp.
double defined_value(const Codec& codec, std::uint32_t bits) {
  const int exponent_count = 15 - codec.mantissa_bits;
  const int exponent = static_cast<int>((bits >> codec.mantissa_bits) & ((1u << exponent_count) - 1));
  const double mantissa = bits & ((1u << codec.mantissa_bits) - 1);
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_count) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  const double fraction = std::ldexp(mantissa, -codec.mantissa_bits);
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - codec.bias)
                       : sign * std::ldexp(1 + fraction, exponent - codec.bias);
}

TEST(Half, EveryEncodingDecodesToItsDefinitionAndBack) {
  for (const Codec& codec : kCodecs) {
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      const double expected = defined_value(codec, bits);
      const float decoded = codec.decode(static_cast<std::uint16_t>(bits));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(decoded)) << codec.name << " " << bits;
        ASSERT_TRUE(std::isnan(codec.decode(codec.encode(static_cast<double>(decoded))))) << codec.name << " " << bits;
        continue;
      }
      ASSERT_EQ(static_cast<double>(decoded), expected) << codec.name << " " << bits;
      ASSERT_EQ(std::signbit(decoded), (bits & 0x8000u) != 0) << codec.name << " " << bits;
      ASSERT_EQ(codec.encode(static_cast<double>(decoded)), bits) << codec.name;
    }
  }
}

TEST(Half, EveryMidpointRoundsToEvenAndItsNeighboursToTheNearer) {
  for (const Codec& codec : kCodecs) {
    const std::uint32_t infinity = ((1u << (15 - codec.mantissa_bits)) - 1) << codec.mantissa_bits;
    for (std::uint32_t low = 0; low < infinity; ++low) {
      const std::uint32_t high = low + 1;
      const double below = defined_value(codec, low);
      // Past the largest finite value the next step of the grid stands in for infinity.
      const double above = high == infinity ? 2 * below - defined_value(codec, low - 1) : defined_value(codec, high);
      const double middle = below + (above - below) / 2;
      const std::uint32_t even = (low & 1) == 0 ? low : high;
      for (const std::uint32_t sign : {0u, 0x8000u}) {
        const double factor = sign != 0 ? -1.0 : 1.0;
        ASSERT_EQ(codec.encode(factor * middle), even | sign) << codec.name << " " << low;
        ASSERT_EQ(codec.encode(factor * std::nextafter(middle, 0.0)), low | sign) << codec.name << " " << low;
        ASSERT_EQ(codec.encode(factor * std::nextafter(middle, 1e300)), high | sign) << codec.name << " " << low;
      }
    }
  }
}

TEST(Half, OverflowsToInfinityAndUnderflowsToSignedZero) {
  EXPECT_EQ(encode_f16(65519.999), 0x7bff);
  EXPECT_EQ(encode_f16(65520.0), 0x7c00);
  EXPECT_EQ(encode_f16(-1e300), 0xfc00);
  EXPECT_EQ(encode_bf16(3.4e38), 0x7f80);
  EXPECT_EQ(encode_f16(-std::numeric_limits<double>::denorm_min()), 0x8000);
  EXPECT_EQ(encode_bf16(std::numeric_limits<double>::min()), 0);
}

TEST(Half, ElementsAreStoredAndLoadedByType) {
  alignas(4) unsigned char memory[64];
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (int i = 0; i < 8; ++i) store_element(memory, dtype, i, 0.1 * i - 0.3);
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(load_element(memory, dtype, i), round_to(dtype, 0.1 * i - 0.3));
      EXPECT_NEAR(load_element(memory, dtype, i), 0.1 * i - 0.3, epsilon_of(dtype));
    }
  }
  store_element(memory, DType::i32, 3, -7);
  EXPECT_EQ(load_element(memory, DType::i32, 3), -7.0);
  memory[5] = 0x80;  // any nonzero byte is true
  EXPECT_EQ(load_element(memory, DType::b8, 5), 1.0);
  store_element(memory, DType::b8, 5, 0);
  EXPECT_EQ(load_element(memory, DType::b8, 5), 0.0);
}

}  // namespace
}  // namespace dspattn::core
