// N:M matrices: prune, compress, decompress, metadata. PyTorch judges the metadata in tests/python/test_metadata.py.
#include "dspattn/nm_matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "core/half.h"
#include "core/metadata.h"
#include "dspattn/error.h"

namespace dspattn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Distinct small integers in a scrambled order.
std::vector<float> scrambled(std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((i * 7919 + 13) % 1009) - 500.0f;
  return values;
}

TEST(NmMatrix, PruneKeepsTheLargestOfEachGroupForAnyPattern) {
  for (const Grouping grouping : {Grouping::consecutive, Grouping::interleaved}) {
    for (const Pattern pattern :
         {Pattern{2, 4}, Pattern{1, 2}, Pattern{3, 5}, Pattern{7, 8}, Pattern{4, 32}, Pattern{1, 1}, Pattern{5, 16}}) {
      if (grouping == Grouping::interleaved && 128 % pattern.group != 0) continue;
      for (const std::int64_t cols : {1, 4, 37, 128, 130, 300}) {
        const std::int64_t rows = 3;
        const std::vector<float> dense = scrambled(rows * cols);
        const NmMatrix matrix = prune({dense.data(), DType::f32, {rows, cols}}, pattern, grouping);
        std::vector<float> restored(dense.size());
        decompress(matrix, {restored.data(), DType::f32, {rows, cols}}, -std::numeric_limits<double>::infinity());
        for (std::int64_t row = 0; row < rows; ++row) {
          for (std::int64_t col = 0; col < cols; ++col) {
            // Kept exactly when fewer than `keep` members of its group beat it.
            const auto place = place_of_key(col, pattern.group, grouping);
            const float value = dense[static_cast<std::size_t>(row * cols + col)];
            int better = 0;
            for (int member = 0; member < pattern.group; ++member) {
              const std::int64_t other = key_at_place(place.group, member, pattern.group, grouping);
              if (other >= cols) continue;
              const float rival = dense[static_cast<std::size_t>(row * cols + other)];
              better += rival > value || (rival == value && other < col);
            }
            EXPECT_EQ(restored[static_cast<std::size_t>(row * cols + col)], better < pattern.keep ? value : -kInfinity);
          }
        }
      }
    }
  }
}

TEST(NmMatrix, PruneBreaksTiesLowAndPutsMinusInfinityLast) {
  const std::vector<float> scores{-kInfinity, 1, -kInfinity, 1, 2, 2, 2, 2};
  const NmMatrix matrix = prune({scores.data(), DType::f32, {1, 8}}, {2, 4});
  EXPECT_EQ(matrix.column(0, 0), 1);
  EXPECT_EQ(matrix.column(0, 1), 3);
  EXPECT_EQ(matrix.column(0, 2), 4);
  EXPECT_EQ(matrix.column(0, 3), 5);
}

TEST(NmMatrix, AsksOnlyForElementsThatThereAre) {
  const std::vector<float> dense = scrambled(5 * 37);
  const NmMatrix matrix = prune({dense.data(), DType::f32, {5, 37}}, {1, 2});
  for (const auto& [row, slot] : {std::pair{5, 0}, {-1, 0}, {0, 19}, {0, -1}}) {
    EXPECT_THROW((void)matrix.value(row, slot), Error);
    EXPECT_THROW((void)matrix.column(row, slot), Error);
  }
  EXPECT_EQ(matrix.column(4, 18), 36);
}

TEST(NmMatrix, OneThatWasMovedFromIsEmpty) {
  const std::vector<float> dense = scrambled(5 * 37);
  const auto made = [&] { return prune({dense.data(), DType::f32, {5, 37}}, {1, 2}); };
  const NmMatrix wanted = made();
  const auto expect_empty = [](const NmMatrix& matrix) {
    EXPECT_EQ(matrix.rows(), 0);
    EXPECT_EQ(matrix.cols(), 0);
    EXPECT_EQ(matrix.slots(), 0);
    EXPECT_TRUE(matrix.values().empty());
    EXPECT_TRUE(matrix.indices().empty());
    EXPECT_TRUE(encode_metadata(matrix).empty());
    float nothing = 0;
    decompress(matrix, {&nothing, DType::f32, {0, 0}});
  };
  const auto expect_whole = [&](const NmMatrix& matrix) {
    EXPECT_EQ(matrix.cols(), 37);
    EXPECT_EQ(encode_metadata(matrix), encode_metadata(wanted));
    EXPECT_EQ(matrix.value(4, 3), wanted.value(4, 3));
  };
  NmMatrix first = made();
  NmMatrix second = std::move(first);
  expect_empty(first);  // NOLINT: what is left is asked for on purpose
  expect_whole(second);
  first = std::move(second);
  expect_empty(second);  // NOLINT
  expect_whole(first);
  NmMatrix& same = first;
  first = std::move(same);
  expect_whole(first);
}

TEST(NmMatrix, CompressAndDecompressAreInverse) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::int64_t rows = 5, cols = 45;
    std::vector<std::byte> memory(static_cast<std::size_t>(rows * cols) * size_bytes(dtype));
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      const std::int64_t in_group = i % cols % 5;
      core::store_element(memory.data(), dtype, i, (i * i + in_group) % 5 < 2 && in_group != 1 ? double(i % 9) - 4 : 0);
    }
    const ConstTensorView dense(memory.data(), dtype, {rows, cols});
    const NmMatrix matrix = compress(dense, {3, 5});
    std::vector<std::byte> restored(memory.size());
    decompress(matrix, {restored.data(), dtype, {rows, cols}});
    EXPECT_EQ(restored, memory);
  }
}

TEST(NmMatrix, CompressReadsAndDecompressWritesThroughStrides) {
  const std::vector<float> dense{1, 0, 0, 4, 9, 9, 0, 2, 3, 0, 9, 9};  // two rows of 4, 6 apart
  const NmMatrix matrix = compress({dense.data(), DType::f32, {2, 4}, {6, 1}}, {2, 4});
  EXPECT_EQ(matrix.value(1, 0), 2);
  std::vector<float> transposed(8, 7.0f);
  decompress(matrix, {transposed.data(), DType::f32, {2, 4}, {1, 2}});
  EXPECT_EQ(transposed, (std::vector<float>{1, 0, 0, 2, 0, 3, 4, 0}));
}

TEST(NmMatrix, WrongMatricesAreRefused) {
  const std::vector<float> full{1, 2, 3, 4};
  const ConstTensorView dense(full.data(), DType::f32, {1, 4});
  EXPECT_THROW(compress(dense, {2, 4}), Error);
  EXPECT_THROW(prune(dense, {3, 2}), Error);
  EXPECT_THROW(prune(dense, {1, 3}, Grouping::interleaved), Error);
  EXPECT_THROW(prune({nullptr, DType::f32, {1, 4}}, {2, 4}), Error);
  EXPECT_THROW(prune({full.data(), DType::i32, {1, 4}}, {2, 4}), Error);
  EXPECT_THROW(prune({full.data(), DType::f32, {4}}, {2, 4}), Error);
  const NmMatrix matrix = prune(dense, {2, 4});
  std::vector<float> out(4);
  EXPECT_THROW(decompress(matrix, {out.data(), DType::f32, {2, 2}}), Error);
  EXPECT_THROW(decompress(matrix, {out.data(), DType::bf16, {1, 4}}), Error);
  const std::vector<std::byte> values(8);
  EXPECT_NO_THROW(NmMatrix(1, 4, {2, 4}, Grouping::consecutive, DType::f32, values, {1, 3}));
  EXPECT_THROW(NmMatrix(1, 4, {2, 4}, Grouping::consecutive, DType::f32, values, {3, 1}), Error);
  EXPECT_THROW(NmMatrix(1, 4, {2, 4}, Grouping::consecutive, DType::f32, values, {1, 1}), Error);
  EXPECT_THROW(NmMatrix(1, 4, {2, 4}, Grouping::consecutive, DType::f32, values, {1, 4}), Error);
  EXPECT_THROW(NmMatrix(1, 4, {2, 4}, Grouping::consecutive, DType::f32, values, {1}), Error);
}

TEST(Metadata, BlockOffsetsAreAPermutationWithItsInverse) {
  static_assert(core::block_offset({0, 0}, 32) == 0);
  static_assert(core::block_offset({8, 0}, 32) == 1);  // row 8 becomes row 1; its first block swaps with (0, 1)
  static_assert(core::block_offset({0, 1}, 32) == 2);
  for (const std::int64_t rows : {32, 64, 160}) {
    for (const std::int64_t columns : {2, 4, 10}) {
      std::set<std::int64_t> offsets;
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t column = 0; column < columns; ++column) {
          const std::int64_t offset = core::block_offset({row, column}, rows);
          EXPECT_TRUE(offset >= 0 && offset < rows * columns && offsets.insert(offset).second);
          EXPECT_EQ(core::block_at_offset(offset, rows), (core::BlockPlace{row, column}));
        }
      }
    }
  }
}

struct Format {
  DType dtype;
  Pattern pattern;
};

TEST(Metadata, RoundTripsForEveryHardwareFormatAndRaggedShape) {
  for (const Format format : {Format{DType::bf16, {2, 4}}, Format{DType::f16, {1, 2}}, Format{DType::f32, {1, 2}}}) {
    for (const Grouping grouping : {Grouping::consecutive, Grouping::interleaved}) {
      for (const std::int64_t rows : {0, 1, 31, 32, 70}) {
        for (const std::int64_t cols : {0, 1, 2, 6, 32, 45, 256}) {
          const std::vector<float> numbers = scrambled(rows * cols);
          std::vector<std::byte> memory(numbers.size() * size_bytes(format.dtype));
          for (std::size_t i = 0; i < numbers.size(); ++i) {
            core::store_element(memory.data(), format.dtype, static_cast<std::int64_t>(i),
                                static_cast<double>(numbers[i]));
          }
          const NmMatrix matrix = prune({memory.data(), format.dtype, {rows, cols}}, format.pattern, grouping);
          const std::vector<std::uint16_t> metadata = encode_metadata(matrix);
          const auto indices = decode_metadata(metadata, rows, cols, format.pattern, grouping, format.dtype);
          EXPECT_EQ(indices, std::vector<std::uint8_t>(matrix.indices().begin(), matrix.indices().end()));
        }
      }
    }
  }
}

TEST(Metadata, ABlockHoldsFourCodesLowestFirst) {
  // Row 0 keeps elements {0,1}, {2,3}, {1,3}, {0,2}: codes 4, e, d, 8.
  std::vector<std::byte> memory(32 * 32 * 2);
  for (const int col : {0, 1, 6, 7, 9, 11, 12, 14}) core::store_element(memory.data(), DType::f16, col, 1.0);
  const NmMatrix matrix = compress({memory.data(), DType::f16, {32, 32}}, {2, 4});
  const std::vector<std::uint16_t> metadata = encode_metadata(matrix);
  EXPECT_EQ(metadata[0], 0x8de4);
  EXPECT_EQ(metadata[1], 0xeeee);  // empty groups are stored as elements 2 and 3
}

TEST(Metadata, WrongMetadataIsRefused) {
  const Format two_four{DType::bf16, {2, 4}};
  const auto decode = [&](std::uint16_t block, Format format) {
    std::vector<std::uint16_t> metadata(
        64, format.pattern == Pattern{1, 2} && format.dtype != DType::f32 ? 0x8888 : 0xeeee);
    metadata[0] = block;
    return decode_metadata(metadata, 32, format.dtype == DType::f32 ? 16 : 32, format.pattern, Grouping::consecutive,
                           format.dtype);
  };
  EXPECT_NO_THROW(decode(0x4444, two_four));
  EXPECT_THROW(decode(0x4440, two_four), Error);  // 0, 0
  EXPECT_THROW(decode(0x4414, two_four), Error);  // 1, 0
  EXPECT_THROW(decode(0xf444, two_four), Error);  // 3, 3
  EXPECT_NO_THROW(decode(0x8888, {DType::bf16, {1, 2}}));
  EXPECT_THROW(decode(0x8884, {DType::bf16, {1, 2}}), Error);  // both of the first group
  EXPECT_THROW(decode(0xe888, {DType::bf16, {1, 2}}), Error);
  EXPECT_NO_THROW(decode(0xe4e4, {DType::f32, {1, 2}}));
  EXPECT_THROW(decode(0xe484, {DType::f32, {1, 2}}), Error);  // half of one word and half of another
  EXPECT_THROW(decode_metadata(std::vector<std::uint16_t>(63), 32, 32, {2, 4}, Grouping::consecutive, DType::f16),
               Error);
  EXPECT_THROW(metadata_shape(32, 32, {2, 4}, Grouping::consecutive, DType::f32), Error);
  EXPECT_THROW(metadata_shape(32, 32, {3, 5}, Grouping::consecutive, DType::f16), Error);
}

}  // namespace
}  // namespace dspattn
