#include "emulator/warp_matrix.h"

#include <array>
#include <cstring>

#include "emulator/elements.h"

namespace dspattn::emulator {
namespace {

using Given = std::array<std::uint64_t, kWarp>;

template <typename T>
T& given(const Given& all, int lane) {
  return *reinterpret_cast<T*>(static_cast<std::uintptr_t>(all[static_cast<std::size_t>(lane)]));
}

struct Load {
  std::uint32_t (&words)[4];
  std::uint32_t address;
  bool transposed;
};

// Lane (g, t) = 4g + t receives elements 2t and 2t + 1 of row g of each matrix, or g of rows 2t and 2t + 1.
void load_together(const Given& all) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::array<std::array<std::uint16_t, 8>, 8> rows;
    for (int row = 0; row < 8; ++row) {
      const std::uint32_t address = given<Load>(all, 8 * matrix + row).address;
      if (address % 16 != 0) Machine::fail("a matrix at an address that is not aligned");
      std::memcpy(rows[std::size_t(row)].data(), Machine::get().shared(address, 16), 16);
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      const auto g = std::size_t(lane / 4), t = std::size_t(lane % 4);
      Load& load = given<Load>(all, lane);
      const std::uint32_t low = load.transposed ? rows[2 * t][g] : rows[g][2 * t];
      const std::uint32_t high = load.transposed ? rows[2 * t + 1][g] : rows[g][2 * t + 1];
      load.words[matrix] = low | high << 16;
    }
  }
}

struct Multiply {
  const WarpProduct& product;
  const WarpOperands& operands;
};

// Words of 4 bytes: word w of a row of A is in lane w % 4 of the row's quad, register 2 (w / 4), one more for rows 8 to
// 15; word w of a column of B in lane w % 4 of the column's quad, register w / 4. put(i, x): value i of the row or
// column is x, of all those in register `r` of a quad's four lanes, which register(lane) gives.
template <DType kType, typename Register, typename Put>
void read_words(int r, Register register_of, Put put) {
  constexpr int kInWord = kType == DType::f32 ? 1 : 2;
  for (int t = 0; t < 4; ++t) {
    const std::uint32_t word = register_of(t);
    for (int i = 0; i < kInWord; ++i) put((4 * r + t) * kInWord + i, decode_word<kType>(word, i));
  }
}

template <DType kType>
void multiply_words(const Given& all) {
  constexpr int kCount = kType == DType::f32 ? 8 : 16;  // values of a row of A
  const WarpProduct& product = given<Multiply>(all, 0).product;
  std::array<std::array<float, 8>, 32> b;
  for (std::size_t column = 0; column < 8; ++column) {
    for (int r = 0; r < (product.sparse ? 4 : 2); ++r) {
      read_words<kType>(
          r, [&](int t) { return given<Multiply>(all, 4 * static_cast<int>(column) + t).operands.b[r]; },
          [&](int k, float x) { b[std::size_t(k)][column] = x; });
    }
  }
  for (int row = 0; row < 16; ++row) {
    const int quad = row % 8 * 4, upper = row / 8;
    RowOfA a;
    for (int r = 0; r < 2; ++r) {
      read_words<kType>(
          r, [&](int t) { return given<Multiply>(all, quad + t).operands.a[2 * r + upper]; },
          [&](int i, float x) { a.values[std::size_t(i)] = x; });
    }
    for (int i = 0; i < kCount; ++i) a.k[std::size_t(i)] = i;
    if (product.sparse) {
      const auto half = [&](int lane) {
        return given<Multiply>(all, quad + 2 * product.metadata_pair + lane).operands.metadata >> (16 * upper);
      };
      read_metadata(kType, half(0), half(1), a);
    }
    std::array<float, 8> sums{};
    for (std::size_t i = 0; i < kCount; ++i) {
      const std::array<float, 8>& y = b[std::size_t(a.k[i])];
      for (std::size_t column = 0; column < 8; ++column) sums[column] += a.values[i] * y[column];
    }
    for (int column = 0; column < 8; ++column) {
      float& to = given<Multiply>(all, quad + column / 2).operands.accumulators[2 * upper + column % 2];
      to = (product.from_zero ? 0.0f : to) + sums[std::size_t(column)];
    }
  }
}

void multiply_together(const Given& all) {
  switch (given<Multiply>(all, 0).product.type) {
    case DType::bf16:
      return multiply_words<DType::bf16>(all);
    case DType::f16:
      return multiply_words<DType::f16>(all);
    default:
      return multiply_words<DType::f32>(all);
  }
}

std::uint64_t address_of(const void* operands) {
  return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(operands));
}

}  // namespace

void load_matrices(std::uint32_t (&words)[4], std::uint32_t address, bool transposed) {
  const Load load{words, address, transposed};
  Machine::get().exchange(address_of(&load), transposed ? "ldmatrix.trans" : "ldmatrix", &load_together);
}

void multiply(const WarpProduct& product, const WarpOperands& operands) {
  const Multiply own{product, operands};
  Machine::get().exchange(address_of(&own), product.sparse ? "mma.sp" : "mma", &multiply_together);
}

}  // namespace dspattn::emulator
