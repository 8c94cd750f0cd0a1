// The metadata of sparse tensor cores: which elements of each group are kept, in the order the hardware reads it.
//
// A 4-bit code names two of four 2-byte slots: bits 0-1 the lower, bits 2-3 the upper, lower < upper. Four codes make a
// 2-byte block, the first in the lowest bits. The matrix of blocks is reordered within tiles of 32 rows (rows
// interleaved by 8, the off-diagonal blocks of each 2x2 swapped) and written column by column in pairs of blocks. This
// is the appendix of the paper and CUTLASS's ReorderedMeta; docs/layouts.md has a worked example.
//
// Host and device use these same maps.
#pragma once

#include <cstdint>

#include "dspattn/pattern.h"

namespace dspattn::core {

inline constexpr int kCodesPerBlock = 4;         // 4-bit codes in a 2-byte block
inline constexpr int kMetadataTileRows = 32;     // rows that are reordered together
inline constexpr int kMetadataBlockColumns = 2;  // blocks that are written as one 4-byte unit

// 2:4 of 2-byte elements: the two kept elements, first < second.
DSPATTN_HOST_DEVICE constexpr std::uint32_t code_of_two_four(int first, int second) {
  return static_cast<std::uint32_t>(first) | (static_cast<std::uint32_t>(second) << 2);
}

// 1:2 of 4-byte elements: an element is two slots, so the codes are 0x4 and 0xe.
DSPATTN_HOST_DEVICE constexpr std::uint32_t code_of_one_two(int element) { return element == 0 ? 0x4u : 0xeu; }

// Two neighbouring 1:2 groups of 2-byte elements as one 2:4 group.
DSPATTN_HOST_DEVICE constexpr std::uint32_t code_of_one_two_pair(int first_group_element, int second_group_element) {
  return code_of_two_four(first_group_element, 2 + second_group_element);
}

DSPATTN_HOST_DEVICE constexpr int lower_slot(std::uint32_t code) { return static_cast<int>(code & 3u); }
DSPATTN_HOST_DEVICE constexpr int upper_slot(std::uint32_t code) { return static_cast<int>((code >> 2) & 3u); }
DSPATTN_HOST_DEVICE constexpr bool is_code(std::uint32_t code) { return lower_slot(code) < upper_slot(code); }

// Code `index` (0 ... 3) of a block.
DSPATTN_HOST_DEVICE constexpr std::uint32_t code_in_block(std::uint32_t block, int index) {
  return (block >> (4 * index)) & 0xfu;
}

// A block's place in the matrix of blocks: `row` is the row of the sparse matrix, `column` counts blocks along it.
struct BlockPlace {
  std::int64_t row = 0;
  std::int64_t column = 0;
  constexpr bool operator==(const BlockPlace&) const = default;
};

// Where the block lies in memory, in blocks. `rows` is a multiple of 32, the number of block columns even.
DSPATTN_HOST_DEVICE constexpr std::int64_t block_offset(BlockPlace place, std::int64_t rows) {
  // Row r of a tile goes to row (r mod 8) * 4 + r / 8: rows 0, 8, 16, 24 become neighbours.
  std::int64_t row = place.row / 32 * 32 + place.row % 8 * 4 + place.row % 32 / 8;
  std::int64_t column = place.column;
  if (row % 2 == 0 && column % 2 == 1) {
    ++row;
    --column;
  } else if (row % 2 == 1 && column % 2 == 0) {
    --row;
    ++column;
  }
  return column / 2 * rows * 2 + row * 2 + column % 2;
}

// The inverse of block_offset.
DSPATTN_HOST_DEVICE constexpr BlockPlace block_at_offset(std::int64_t offset, std::int64_t rows) {
  std::int64_t column = offset / (rows * 2) * 2 + offset % 2;
  std::int64_t row = offset % (rows * 2) / 2;
  if (row % 2 == 0 && column % 2 == 1) {
    ++row;
    --column;
  } else if (row % 2 == 1 && column % 2 == 0) {
    --row;
    ++column;
  }
  return {row / 32 * 32 + row % 4 * 8 + row % 32 / 4, column};
}

}  // namespace dspattn::core
