// Lets a test in another language compress and restore matrices with the library.
//
//   metadata_tool compress <dtype> <rows> <cols> <pattern>    stdin: the dense matrix; stdout: nonzeros, then metadata
//   metadata_tool prune    <dtype> <rows> <cols> <pattern>    the same, keeping the largest of each group
//   metadata_tool restore  <dtype> <rows> <cols> <pattern>    stdin: nonzeros, then metadata; stdout: the dense matrix
//
// All raw bytes; dtype is fp32, fp16 or bf16.
#include <cstring>
#include <exception>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "dspattn/error.h"
#include "dspattn/nm_matrix.h"

namespace {

using namespace dspattn;

DType parse_dtype(const std::string& text) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (text == name(dtype)) return dtype;
  }
  throw Error("dtype: expected fp32, fp16 or bf16, got " + text);
}

void write(const void* data, std::size_t bytes) {
  std::cout.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
}

void require_bytes(std::size_t expected, std::size_t given) {
  if (given != expected) {
    throw Error("stdin: expected " + std::to_string(expected) + " bytes, got " + std::to_string(given));
  }
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() != 5) throw Error("usage: metadata_tool compress|prune|restore <dtype> <rows> <cols> <pattern>");
  const DType dtype = parse_dtype(arguments[1]);
  const std::int64_t rows = std::stoll(arguments[2]);
  const std::int64_t cols = std::stoll(arguments[3]);
  const Pattern pattern = parse_pattern(arguments[4]);
  const std::vector<char> input{std::istreambuf_iterator<char>(std::cin), {}};
  std::vector<std::byte> memory(input.size());
  if (!input.empty()) std::memcpy(memory.data(), input.data(), input.size());
  const std::size_t dense_bytes = static_cast<std::size_t>(rows * cols) * size_bytes(dtype);

  if (arguments[0] == "restore") {
    const auto slots = group_count(cols, pattern.group, Grouping::consecutive) * pattern.keep;
    const std::size_t value_bytes = static_cast<std::size_t>(rows * slots) * size_bytes(dtype);
    const MetadataShape shape = metadata_shape(rows, cols, pattern, Grouping::consecutive, dtype);
    std::vector<std::uint16_t> metadata(static_cast<std::size_t>(shape.rows * shape.block_columns));
    require_bytes(value_bytes + metadata.size() * 2, memory.size());
    std::memcpy(metadata.data(), memory.data() + value_bytes, metadata.size() * 2);
    memory.resize(value_bytes);
    const NmMatrix matrix(rows, cols, pattern, Grouping::consecutive, dtype, memory,
                          decode_metadata(metadata, rows, cols, pattern, Grouping::consecutive, dtype));
    std::vector<std::byte> dense(dense_bytes);
    decompress(matrix, {dense.data(), dtype, {rows, cols}});
    write(dense.data(), dense.size());
    return 0;
  }
  require_bytes(dense_bytes, memory.size());
  const ConstTensorView dense(memory.data(), dtype, {rows, cols});
  const NmMatrix matrix = arguments[0] == "prune" ? prune(dense, pattern) : compress(dense, pattern);
  const std::vector<std::uint16_t> metadata = encode_metadata(matrix);
  write(matrix.values().data(), matrix.values().size());
  write(metadata.data(), metadata.size() * 2);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
