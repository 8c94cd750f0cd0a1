#include <initializer_list>
#include <string>

#include "core/metadata.h"
#include "dspattn/error.h"
#include "dspattn/pipeline.h"

namespace dspattn {
namespace {

constexpr std::int64_t whole_units(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Places that a 2-byte metadata block stands for: four codes, each of four 2-byte or two 4-byte elements.
std::int64_t places_per_block(DType dtype) {
  return core::kCodesPerBlock * 8 / static_cast<std::int64_t>(size_bytes(dtype));
}

// The product of sizes that are not negative. Expanded tensors have any extents without having the memory.
std::int64_t product(const SparseShape& shape, std::initializer_list<std::int64_t> factors) {
  std::int64_t result = 1;
  for (const std::int64_t factor : factors) {
    if (!__builtin_mul_overflow(result, factor, &result)) continue;
    throw Error("shape: expected sparse matrices whose size fits in 63 bits, got batch " + std::to_string(shape.batch) +
                ", heads " + std::to_string(shape.heads) + ", n_q " + std::to_string(shape.n_q) + ", n_k " +
                std::to_string(shape.n_k));
  }
  return result;
}

}  // namespace

std::int64_t SparseShape::matrices() const { return product(*this, {batch, heads}); }

std::int64_t SparseShape::rows() const { return whole_units(n_q, core::kMetadataTileRows); }

std::int64_t SparseShape::places() const {
  const std::int64_t stored = block > 0 ? width * block : n_k;
  const std::int64_t unit =
      grouping == Grouping::interleaved ? kInterleaveBlock : places_per_block(dtype) * core::kMetadataBlockColumns;
  return whole_units(stored, unit);
}

std::int64_t SparseShape::nonzeros_per_row() const { return places() / 2; }

std::size_t SparseShape::nonzeros_bytes() const {
  const auto element = static_cast<std::int64_t>(size_bytes(dtype));
  return static_cast<std::size_t>(product(*this, {batch, heads, rows(), nonzeros_per_row(), element}));
}

std::size_t SparseShape::metadata_bytes() const {
  constexpr std::int64_t kBlockBytes = sizeof(std::uint16_t);
  return static_cast<std::size_t>(
      product(*this, {batch, heads, rows(), places() / places_per_block(dtype), kBlockBytes}));
}

}  // namespace dspattn
