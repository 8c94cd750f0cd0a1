#include "dspattn/nm_matrix.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "core/half.h"
#include "core/metadata.h"
#include "core/tensor_checks.h"
#include "dspattn/error.h"

namespace dspattn {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

void raise_if_any(core::Report& report) {
  if (!report.reasons.empty()) throw Error(std::move(report.reasons));
}

void check_format(core::Report& report, Pattern pattern, Grouping grouping, DType dtype) {
  if (pattern.keep < 1 || pattern.keep > pattern.group || pattern.group > kMaxGroup) {
    report.add("pattern", "N:M with 1 <= N <= M <= " + std::to_string(kMaxGroup),
               std::to_string(pattern.keep) + ":" + std::to_string(pattern.group));
  } else if (grouping == Grouping::interleaved && kInterleaveBlock % pattern.group != 0) {
    report.add("pattern", "a group size that divides " + std::to_string(kInterleaveBlock) + " for interleaved grouping",
               to_string(pattern));
  }
  if (!is_floating(dtype)) report.add("dtype", "fp32, fp16 or bf16", std::string(name(dtype)));
}

// Extents of a matrix, and that its stored elements can be counted and addressed.
void check_extents(core::Report& report, std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t kMaxExtent = std::int64_t{1} << 31;
  if (rows < 0 || rows > kMaxExtent) report.add("rows", "0 to 2^31", std::to_string(rows));
  if (cols < 0 || cols > kMaxExtent) report.add("cols", "0 to 2^31", std::to_string(cols));
}

void require_place(const NmMatrix& matrix, std::int64_t row, std::int64_t slot) {
  core::Report report;
  for (const auto& [argument, value, end] : {std::tuple{"row", row, matrix.rows()}, {"slot", slot, matrix.slots()}}) {
    if (value < 0 || value >= end) {
      report.add(argument, "from 0 to below " + std::to_string(end), std::to_string(value));
    }
  }
  raise_if_any(report);
}

double element(const ConstTensorView& matrix, std::int64_t row, std::int64_t col) {
  return core::load_element(matrix.data, matrix.dtype, row * matrix.step(0) + col * matrix.step(1));
}

// Builds a matrix group by group: choose(row, group) returns the kept elements in ascending order.
template <typename Choose>
NmMatrix build(const ConstTensorView& dense, Pattern pattern, Grouping grouping, double absent, Choose choose) {
  const std::int64_t rows = dense.extent(0);
  const std::int64_t cols = dense.extent(1);
  const std::int64_t groups = group_count(cols, pattern.group, grouping);
  const auto stored = static_cast<std::size_t>(rows * groups * pattern.keep);
  std::vector<std::byte> values(stored * size_bytes(dense.dtype));
  std::vector<std::uint8_t> indices;
  indices.reserve(stored);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t group = 0; group < groups; ++group) {
      for (const int kept : choose(row, group)) {
        const std::int64_t col = key_at_place(group, kept, pattern.group, grouping);
        core::store_element(values.data(), dense.dtype, static_cast<std::int64_t>(indices.size()),
                            col < cols ? element(dense, row, col) : absent);
        indices.push_back(static_cast<std::uint8_t>(kept));
      }
    }
  }
  return NmMatrix(rows, cols, pattern, grouping, dense.dtype, std::move(values), std::move(indices));
}

void check_dense(const char* argument, const ConstTensorView& dense, Pattern pattern, Grouping grouping) {
  core::Report report;
  if (core::check_input(report, argument, dense, "[rows, cols]", 2, core::Inner::any)) {
    check_extents(report, dense.extent(0), dense.extent(1));
  }
  check_format(report, pattern, grouping, dense.dtype);
  raise_if_any(report);
}

// How the metadata of a type and pattern is made: which slots of a code belong to which of our groups.
enum class Coding { two_four, one_two_words, one_two_pairs };

Coding coding_of(Pattern pattern, DType dtype) {
  const bool sixteen_bit = dtype == DType::f16 || dtype == DType::bf16;
  if (sixteen_bit && pattern == Pattern{2, 4}) return Coding::two_four;
  if (sixteen_bit && pattern == Pattern{1, 2}) return Coding::one_two_pairs;
  if (dtype == DType::f32 && pattern == Pattern{1, 2}) return Coding::one_two_words;
  throw Error("pattern: expected 2:4 or 1:2 of fp16 or bf16, or 1:2 of fp32, which sparse tensor cores take, got " +
              to_string(pattern) + " of " + std::string(name(dtype)));
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int indices_per_code(Coding coding) { return coding == Coding::one_two_words ? 1 : 2; }

// The code of the stored indices that belong to it; `count` of them exist, the others are absent elements.
std::uint32_t code_of(Coding coding, const std::uint8_t* indices, std::int64_t count) {
  if (count <= 0) return core::code_of_two_four(2, 3);  // as for an empty group
  switch (coding) {
    case Coding::two_four:
      return core::code_of_two_four(indices[0], indices[1]);
    case Coding::one_two_words:
      return core::code_of_one_two(indices[0]);
    case Coding::one_two_pairs:
      return core::code_of_one_two_pair(indices[0], count > 1 ? indices[1] : 1);
  }
  return 0;
}

}  // namespace

NmMatrix::NmMatrix(std::int64_t rows, std::int64_t cols, Pattern pattern, Grouping grouping, DType dtype,
                   std::vector<std::byte> values, std::vector<std::uint8_t> indices)
    : rows_(rows),
      cols_(cols),
      pattern_(pattern),
      grouping_(grouping),
      dtype_(dtype),
      values_(std::move(values)),
      indices_(std::move(indices)) {
  core::Report report;
  check_format(report, pattern, grouping, dtype);
  check_extents(report, rows, cols);
  raise_if_any(report);
  const auto stored = static_cast<std::size_t>(rows_ * slots());
  if (values_.size() != stored * size_bytes(dtype)) {
    report.add("values", std::to_string(stored * size_bytes(dtype)) + " bytes", std::to_string(values_.size()));
  }
  if (indices_.size() != stored) report.add("indices", std::to_string(stored), std::to_string(indices_.size()));
  raise_if_any(report);
  for (std::size_t i = 0; i < stored; ++i) {
    const bool first_of_group = i % static_cast<std::size_t>(pattern.keep) == 0;
    if (indices_[i] >= pattern.group || (!first_of_group && indices_[i] <= indices_[i - 1])) {
      throw Error("indices[" + std::to_string(i) + "]: expected an element of the group, 0 to " +
                  std::to_string(pattern.group - 1) + ", above the one before it, got " + std::to_string(indices_[i]));
    }
  }
}

NmMatrix::NmMatrix(NmMatrix&& other) noexcept
    : rows_(std::exchange(other.rows_, 0)),
      cols_(std::exchange(other.cols_, 0)),
      pattern_(other.pattern_),
      grouping_(other.grouping_),
      dtype_(other.dtype_),
      values_(std::exchange(other.values_, {})),
      indices_(std::exchange(other.indices_, {})) {}

NmMatrix& NmMatrix::operator=(NmMatrix&& other) noexcept {
  NmMatrix taken(std::move(other));  // first, or a matrix moved to itself would lose its elements
  rows_ = taken.rows_;
  cols_ = taken.cols_;
  pattern_ = taken.pattern_;
  grouping_ = taken.grouping_;
  dtype_ = taken.dtype_;
  values_.swap(taken.values_);
  indices_.swap(taken.indices_);
  return *this;
}

double NmMatrix::value(std::int64_t row, std::int64_t slot) const {
  require_place(*this, row, slot);
  return core::load_element(values_.data(), dtype_, row * slots() + slot);
}

std::int64_t NmMatrix::column(std::int64_t row, std::int64_t slot) const {
  require_place(*this, row, slot);
  return key_at_place(slot / pattern_.keep, indices_[static_cast<std::size_t>(row * slots() + slot)], pattern_.group,
                      grouping_);
}

NmMatrix prune(const ConstTensorView& scores, Pattern pattern, Grouping grouping) {
  check_dense("scores", scores, pattern, grouping);
  const auto score_at = [&](std::int64_t row, std::int64_t group, int member) {
    const std::int64_t col = key_at_place(group, member, pattern.group, grouping);
    const double score = col < scores.extent(1) ? element(scores, row, col) : kMinusInfinity;
    return std::isnan(score) ? -kMinusInfinity : score;
  };
  std::vector<int> order;
  return build(scores, pattern, grouping, kMinusInfinity, [&](std::int64_t row, std::int64_t group) {
    order.resize(static_cast<std::size_t>(pattern.group));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return score_at(row, group, a) > score_at(row, group, b); });
    order.resize(static_cast<std::size_t>(pattern.keep));
    std::sort(order.begin(), order.end());
    return order;
  });
}

NmMatrix compress(const ConstTensorView& sparse, Pattern pattern, Grouping grouping) {
  check_dense("sparse", sparse, pattern, grouping);
  return build(sparse, pattern, grouping, 0.0, [&](std::int64_t row, std::int64_t group) {
    std::vector<int> kept;
    std::vector<bool> taken(static_cast<std::size_t>(pattern.group), false);
    for (int member = 0; member < pattern.group; ++member) {
      const std::int64_t col = key_at_place(group, member, pattern.group, grouping);
      if (col >= sparse.extent(1) || element(sparse, row, col) == 0.0) continue;
      kept.push_back(member);
      taken[static_cast<std::size_t>(member)] = true;
    }
    if (kept.size() > static_cast<std::size_t>(pattern.keep)) {
      throw Error("sparse: expected at most " + std::to_string(pattern.keep) + " nonzeros in each group of " +
                  std::to_string(pattern.group) + ", got " + std::to_string(kept.size()) + " in group " +
                  std::to_string(group) + " of row " + std::to_string(row));
    }
    for (int member = pattern.group - pattern.keep; kept.size() < static_cast<std::size_t>(pattern.keep); ++member) {
      if (!taken[static_cast<std::size_t>(member)]) kept.push_back(member);
    }
    std::sort(kept.begin(), kept.end());
    return kept;
  });
}

void decompress(const NmMatrix& matrix, const TensorView& dense, double fill) {
  core::Report report;
  if (core::check_output(report, "dense", dense, "[rows, cols]", 2, core::Inner::any)) {
    const ConstTensorView wanted(nullptr, matrix.dtype(), {matrix.rows(), matrix.cols()});
    if (dense.extent(0) != matrix.rows() || dense.extent(1) != matrix.cols()) {
      report.add("dense.shape", core::shape_text(wanted), core::shape_text(dense));
    }
  }
  if (dense.dtype != matrix.dtype()) {
    report.add("dense.dtype", std::string(name(matrix.dtype())), std::string(name(dense.dtype)));
  }
  raise_if_any(report);
  for (std::int64_t row = 0; row < matrix.rows(); ++row) {
    const auto offset = [&](std::int64_t col) { return row * dense.step(0) + col * dense.step(1); };
    for (std::int64_t col = 0; col < matrix.cols(); ++col) {
      core::store_element(dense.data, dense.dtype, offset(col), fill);
    }
    for (std::int64_t slot = 0; slot < matrix.slots(); ++slot) {
      const std::int64_t col = matrix.column(row, slot);
      if (col >= matrix.cols()) continue;
      core::store_element(dense.data, dense.dtype, offset(col), matrix.value(row, slot));
    }
  }
}

MetadataShape metadata_shape(std::int64_t rows, std::int64_t cols, Pattern pattern, Grouping grouping, DType dtype) {
  core::Report report;
  check_extents(report, rows, cols);
  raise_if_any(report);
  const int per_code = indices_per_code(coding_of(pattern, dtype));
  const std::int64_t slots = group_count(cols, pattern.group, grouping) * pattern.keep;
  const std::int64_t blocks = (slots + per_code * core::kCodesPerBlock - 1) / (per_code * core::kCodesPerBlock);
  return {round_up(rows, core::kMetadataTileRows), round_up(blocks, core::kMetadataBlockColumns)};
}

std::vector<std::uint16_t> encode_metadata(const NmMatrix& matrix) {
  const Coding coding = coding_of(matrix.pattern(), matrix.dtype());
  const MetadataShape shape =
      metadata_shape(matrix.rows(), matrix.cols(), matrix.pattern(), matrix.grouping(), matrix.dtype());
  std::vector<std::uint16_t> metadata(static_cast<std::size_t>(shape.rows * shape.block_columns));
  const int per_code = indices_per_code(coding);
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    for (std::int64_t column = 0; column < shape.block_columns; ++column) {
      std::uint32_t block = 0;
      for (int code = 0; code < core::kCodesPerBlock; ++code) {
        const std::int64_t slot = (column * core::kCodesPerBlock + code) * per_code;
        const std::int64_t count = row < matrix.rows() ? matrix.slots() - slot : 0;
        const std::uint8_t* indices = count > 0 ? matrix.indices().data() + row * matrix.slots() + slot : nullptr;
        block |= code_of(coding, indices, count) << (4 * code);
      }
      metadata[static_cast<std::size_t>(core::block_offset({row, column}, shape.rows))] =
          static_cast<std::uint16_t>(block);
    }
  }
  return metadata;
}

std::vector<std::uint8_t> decode_metadata(std::span<const std::uint16_t> metadata, std::int64_t rows, std::int64_t cols,
                                          Pattern pattern, Grouping grouping, DType dtype) {
  const Coding coding = coding_of(pattern, dtype);
  const MetadataShape shape = metadata_shape(rows, cols, pattern, grouping, dtype);
  const auto blocks = static_cast<std::uint64_t>(shape.rows) * static_cast<std::uint64_t>(shape.block_columns);
  if (metadata.size() != blocks) {
    throw Error("metadata: expected " + std::to_string(shape.rows) + " x " + std::to_string(shape.block_columns) +
                " two-byte blocks, got " + std::to_string(metadata.size()));
  }
  const std::int64_t slots = group_count(cols, pattern.group, grouping) * pattern.keep;
  const int per_code = indices_per_code(coding);
  std::vector<std::uint8_t> indices;
  indices.reserve(static_cast<std::size_t>(rows * slots));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t slot = 0; slot < slots; slot += per_code) {
      const std::int64_t code_number = slot / per_code;
      const std::int64_t offset = core::block_offset({row, code_number / core::kCodesPerBlock}, shape.rows);
      const std::uint32_t code = core::code_in_block(metadata[static_cast<std::size_t>(offset)],
                                                     static_cast<int>(code_number % core::kCodesPerBlock));
      const int lower = core::lower_slot(code);
      const int upper = core::upper_slot(code);
      const bool fits = coding == Coding::two_four        ? core::is_code(code)
                        : coding == Coding::one_two_words ? code == 0x4u || code == 0xeu
                                                          : lower < 2 && upper >= 2;
      if (!fits) {
        throw Error("metadata: expected ascending indices that " + to_string(pattern) + " of " +
                    std::string(name(dtype)) + " has, got " + std::to_string(lower) + " and " + std::to_string(upper) +
                    " in code " + std::to_string(code_number) + " of row " + std::to_string(row));
      }
      switch (coding) {
        case Coding::two_four:
          indices.push_back(static_cast<std::uint8_t>(lower));
          indices.push_back(static_cast<std::uint8_t>(upper));
          break;
        case Coding::one_two_words:
          indices.push_back(static_cast<std::uint8_t>(lower / 2));
          break;
        case Coding::one_two_pairs:
          indices.push_back(static_cast<std::uint8_t>(lower));
          if (slot + 1 < slots) indices.push_back(static_cast<std::uint8_t>(upper - 2));
          break;
      }
    }
  }
  return indices;
}

}  // namespace dspattn
