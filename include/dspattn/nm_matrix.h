// N:M sparse matrices in memory: pruning, compression, and the metadata that sparse tensor cores read.
//
//   dspattn::NmMatrix matrix = dspattn::prune({scores, dspattn::DType::bf16, {rows, cols}}, {2, 4});
//   matrix.values();                                   // rows x cols/2 nonzeros, row-major
//   std::vector<std::uint16_t> metadata = dspattn::encode_metadata(matrix);   // as CUTLASS and PyTorch lay it out
//
// Everything here runs on the host. All functions throw dspattn::Error with every reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "dspattn/pattern.h"
#include "dspattn/tensor_view.h"

namespace dspattn {

// rows x cols, of which each group of `group` columns stores `keep` elements ("slots"). When cols does not fill the
// last group (or block of 128, interleaved), the missing columns are stored as absent elements: 0 or, pruned, -inf.
class NmMatrix {
 public:
  // values: rows * groups * keep elements of type dtype, row-major; indices: for each value the element of its group,
  // ascending within the group.
  NmMatrix(std::int64_t rows, std::int64_t cols, Pattern pattern, Grouping grouping, DType dtype,
           std::vector<std::byte> values, std::vector<std::uint8_t> indices);

  // One that was moved from is empty, 0 x 0: its extents say what it stores.
  NmMatrix(const NmMatrix&) = default;
  NmMatrix& operator=(const NmMatrix&) = default;
  NmMatrix(NmMatrix&& other) noexcept;
  NmMatrix& operator=(NmMatrix&& other) noexcept;
  ~NmMatrix() = default;

  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  Pattern pattern() const { return pattern_; }
  Grouping grouping() const { return grouping_; }
  DType dtype() const { return dtype_; }
  std::int64_t groups() const { return group_count(cols_, pattern_.group, grouping_); }
  std::int64_t slots() const { return groups() * pattern_.keep; }  // stored elements of a row

  std::span<const std::byte> values() const { return values_; }
  std::span<const std::uint8_t> indices() const { return indices_; }

  // Both throw dspattn::Error for a row or slot that there is not.
  double value(std::int64_t row, std::int64_t slot) const;
  // The column of a stored element; >= cols() for an absent one.
  std::int64_t column(std::int64_t row, std::int64_t slot) const;

 private:
  std::int64_t rows_, cols_;
  Pattern pattern_;
  Grouping grouping_;
  DType dtype_;
  std::vector<std::byte> values_;
  std::vector<std::uint8_t> indices_;
};

// Keeps the `keep` largest elements of each group by signed value; ties keep the lower column, NaN counts as largest.
// `scores` is a matrix [rows, cols] of fp32, fp16 or bf16.
NmMatrix prune(const ConstTensorView& scores, Pattern pattern, Grouping grouping = Grouping::consecutive);

// Stores a matrix that is sparse already: at most `keep` nonzeros in each group. Free slots are zeros of the lowest
// free elements from group - keep on, as PyTorch's conversion places them.
NmMatrix compress(const ConstTensorView& sparse, Pattern pattern, Grouping grouping = Grouping::consecutive);

// Writes the matrix [rows, cols] of the matrix's type with `fill` (0, or -inf for scores) where nothing is stored.
void decompress(const NmMatrix& matrix, const TensorView& dense, double fill = 0.0);

// The extents of the metadata in 2-byte blocks: rows rounded up to 32, block columns rounded up to 2.
struct MetadataShape {
  std::int64_t rows = 0;
  std::int64_t block_columns = 0;
};

MetadataShape metadata_shape(std::int64_t rows, std::int64_t cols, Pattern pattern, Grouping grouping, DType dtype);

// Metadata of a 2:4 or 1:2 matrix of a 16-bit type (1:2 is expressed inside 2:4) or a 1:2 matrix of fp32, in the
// reordered layout of docs/layouts.md. With interleaved grouping the columns are in the order of groups.
std::vector<std::uint16_t> encode_metadata(const NmMatrix& matrix);

// The indices of NmMatrix from metadata. Refuses metadata of the wrong size, equal or descending indices, and indices
// that the pattern does not have.
std::vector<std::uint8_t> decode_metadata(std::span<const std::uint16_t> metadata, std::int64_t rows, std::int64_t cols,
                                          Pattern pattern, Grouping grouping, DType dtype);

}  // namespace dspattn
