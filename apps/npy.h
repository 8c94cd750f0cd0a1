// Arrays in NumPy's .npy files (format versions 1, 2 and 3): reading and writing, with errors that name the file.
//
// Types: float32, float16, bool, int32, int64 (read as int32 when every value fits), in either byte order. bfloat16 is
// what ml_dtypes writes: type string "<V2"; 16-bit unsigned integers can be taken for bfloat16 bits on request, and
// integers of any width for a mask's truth values. Fortran order is turned into C order. Nothing is allocated before
// the header has been held against the size of the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <istream>
#include <ostream>
#include <string>
#include <vector>

#include "dspattn/tensor_view.h"

namespace dspattn::apps {

struct NpyArray {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;  // at most kMaxRank extents
  std::vector<std::byte> bytes;     // C order, this machine's byte order
};

// What the array is for, which decides what integers mean.
enum class NpyUse : std::uint8_t {
  numbers,
  bf16_bits,  // 16-bit unsigned integers are the bits of bfloat16 numbers
  mask,       // integers of any width are truth values, as NumPy takes them: anything but 0 is true
};

// Throws Error: missing, truncated or overlong file, no .npy, damaged header, type or rank that is not taken.
NpyArray read_npy(const std::filesystem::path& path, NpyUse use = NpyUse::numbers);

// The same from a stream of `file_bytes` bytes; `name` is for messages.
NpyArray read_npy(std::istream& stream, std::uint64_t file_bytes, const std::string& name,
                  NpyUse use = NpyUse::numbers);

// Format version 1, C order, little endian.
void write_npy(std::ostream& stream, const NpyArray& array);

}  // namespace dspattn::apps
