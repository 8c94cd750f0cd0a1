#include "core/metadata.h"
#include "dspattn/pipeline.h"

namespace dspattn {
namespace {

constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Places that a 2-byte metadata block stands for: four codes, each of four 2-byte or two 4-byte elements.
std::int64_t places_per_block(DType dtype) {
  return core::kCodesPerBlock * 8 / static_cast<std::int64_t>(size_bytes(dtype));
}

}  // namespace

std::int64_t SparseShape::rows() const { return round_up(n_q, core::kMetadataTileRows); }

std::int64_t SparseShape::places() const {
  const std::int64_t stored = block > 0 ? width * block : n_k;
  const std::int64_t unit =
      grouping == Grouping::interleaved ? kInterleaveBlock : places_per_block(dtype) * core::kMetadataBlockColumns;
  return round_up(stored, unit);
}

std::int64_t SparseShape::nonzeros_per_row() const { return places() / 2; }

std::size_t SparseShape::nonzeros_bytes() const {
  return static_cast<std::size_t>(matrices() * rows() * nonzeros_per_row()) * size_bytes(dtype);
}

std::size_t SparseShape::metadata_bytes() const {
  return static_cast<std::size_t>(matrices() * rows() * (places() / places_per_block(dtype))) * sizeof(std::uint16_t);
}

}  // namespace dspattn
