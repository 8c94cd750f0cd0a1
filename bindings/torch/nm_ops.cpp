// The library's codec of N:M matrices as operators on CPU tensors: which elements are kept, and their metadata in the
// layout of sparse tensor cores. Matrices are stacked along the first dimension. Values never pass through here:
// Python gathers and scatters them, so that they stay differentiable.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "dspattn/nm_matrix.h"
#include "place.h"
#include "stack.h"
#include "views.h"

namespace dspattn::torch_binding {
namespace {

void require_stack_of_matrices(const Tensor& tensor, std::string_view argument) {
  if (tensor.dim() != 3) {
    throw Error(std::string(argument) + ": expected 3 dimensions [matrices, rows, columns], got " +
                std::to_string(tensor.dim()));
  }
  if (!tensor.is_contiguous()) throw Error(std::string(argument) + ": expected a contiguous tensor, got a strided one");
}

void require_type(const Tensor& tensor, std::int32_t code, std::string_view argument, const char* expected) {
  if (scalar_type_of(tensor) != code)
    throw Error(std::string(argument) + ": expected " + expected + ", got another type");
}

// Slots are counted with it before the library sees the call.
Pattern pattern_of(const PatternNumbers& given, Grouping grouping) {
  const Pattern pattern = given.checked();
  if (grouping == Grouping::interleaved && kInterleaveBlock % pattern.group != 0) {
    throw Error("pattern: expected a group size that divides " + std::to_string(kInterleaveBlock) +
                " for interleaved grouping, got " + to_string(pattern));
  }
  return pattern;
}

void require_count(std::int64_t count, std::string_view argument) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;  // what the codec takes
  if (count >= 0 && count <= kMost) return;
  throw Error(std::string(argument) + ": expected a count from 0 to 2^31, got " + std::to_string(count));
}

// 2-byte and 4-byte elements have different metadata; which 2-byte type it is does not matter.
DType type_of_width(bool wide) { return wide ? DType::f32 : DType::f16; }

// nm_prune(scores, keep, group, interleaved) -> indices: for each kept score the element of its group.
void run_prune(Stack& stack) {
  const Tensor scores = stack.tensor();
  const PatternNumbers given = stack.pattern();
  const Grouping grouping = grouping_of(stack.boolean());
  require_stack_of_matrices(scores, "scores");
  const Pattern pattern = pattern_of(given, grouping);
  const std::int64_t count = scores.size(0), rows = scores.size(1), cols = scores.size(2);
  const std::int64_t slots = group_count(cols, pattern.group, grouping) * pattern.keep;
  const Tensor indices = empty_like_strided(scores, aoti_torch_dtype_uint8(), {count, rows, slots}, {0, 1, 2});
  auto* out = static_cast<std::uint8_t*>(indices.mutable_data_ptr());
  const ConstTensorView all = const_view(scores, "scores");
  for (std::int64_t i = 0; i < count; ++i) {
    const auto* matrix =
        static_cast<const std::byte*>(all.data) + static_cast<std::size_t>(i * rows * cols) * size_bytes(all.dtype);
    const NmMatrix pruned = prune({matrix, all.dtype, {rows, cols}}, pattern, grouping);
    std::ranges::copy(pruned.indices(), out + i * rows * slots);
  }
  stack.give(indices);
}

// nm_encode(indices, columns, keep, group, interleaved, wide) -> metadata
void run_encode(Stack& stack) {
  const Tensor indices = stack.tensor();
  const std::int64_t cols = stack.integer();
  const PatternNumbers given = stack.pattern();
  const Grouping grouping = grouping_of(stack.boolean());
  const DType dtype = type_of_width(stack.boolean());
  require_stack_of_matrices(indices, "indices");
  require_type(indices, aoti_torch_dtype_uint8(), "indices", "uint8");
  const Pattern pattern = pattern_of(given, grouping);
  const std::int64_t count = indices.size(0), rows = indices.size(1), slots = indices.size(2);
  const MetadataShape shape = metadata_shape(rows, cols, pattern, grouping, dtype);
  const Tensor metadata =
      empty_like_strided(indices, aoti_torch_dtype_int16(), {count, shape.rows, shape.block_columns}, {0, 1, 2});
  const auto* in = static_cast<const std::uint8_t*>(indices.const_data_ptr());
  auto* out = static_cast<std::byte*>(metadata.mutable_data_ptr());
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint8_t* first = in + i * rows * slots;
    const std::vector<std::byte> no_values(static_cast<std::size_t>(rows * slots) * size_bytes(dtype));
    const NmMatrix matrix(rows, cols, pattern, grouping, dtype, no_values, {first, first + rows * slots});
    const std::vector<std::uint16_t> encoded = encode_metadata(matrix);
    std::memcpy(out, encoded.data(), encoded.size() * sizeof(std::uint16_t));
    out += encoded.size() * sizeof(std::uint16_t);
  }
  stack.give(metadata);
}

// nm_decode(metadata, rows, columns, keep, group, interleaved, wide) -> indices
void run_decode(Stack& stack) {
  const Tensor metadata = stack.tensor();
  const std::int64_t rows = stack.integer();
  const std::int64_t cols = stack.integer();
  const PatternNumbers given = stack.pattern();
  const Grouping grouping = grouping_of(stack.boolean());
  const DType dtype = type_of_width(stack.boolean());
  require_stack_of_matrices(metadata, "metadata");
  require_type(metadata, aoti_torch_dtype_int16(), "metadata", "int16");
  const Pattern pattern = pattern_of(given, grouping);
  require_count(rows, "rows");
  require_count(cols, "columns");
  const std::int64_t count = metadata.size(0);
  const auto blocks = static_cast<std::size_t>(metadata.size(1) * metadata.size(2));
  const std::int64_t slots = group_count(cols, pattern.group, grouping) * pattern.keep;
  const auto* in = static_cast<const std::uint16_t*>(metadata.const_data_ptr());
  // Decoded before memory is asked for: rows and columns that the metadata does not have are refused by name.
  std::vector<std::uint8_t> decoded;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::span<const std::uint16_t> one(in + static_cast<std::size_t>(i) * blocks, blocks);
    const std::vector<std::uint8_t> matrix = decode_metadata(one, rows, cols, pattern, grouping, dtype);
    decoded.insert(decoded.end(), matrix.begin(), matrix.end());
  }
  const Tensor indices = empty_like_strided(metadata, aoti_torch_dtype_uint8(), {count, rows, slots}, {0, 1, 2});
  std::ranges::copy(decoded, static_cast<std::uint8_t*>(indices.mutable_data_ptr()));
  stack.give(indices);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dspattn, library) {
  library.def("nm_prune(Tensor scores, int keep, int group, bool interleaved) -> Tensor indices");
  library.def(
      "nm_encode(Tensor indices, SymInt columns, int keep, int group, bool interleaved, bool wide) -> Tensor metadata");
  library.def(
      "nm_decode(Tensor metadata, SymInt rows, SymInt columns, int keep, int group, bool interleaved, bool wide) -> "
      "Tensor indices");
}

STABLE_TORCH_LIBRARY_IMPL(dspattn, CPU, library) {
  library.impl("nm_prune", &boxed<run_prune>);
  library.impl("nm_encode", &boxed<run_encode>);
  library.impl("nm_decode", &boxed<run_decode>);
}

}  // namespace dspattn::torch_binding
