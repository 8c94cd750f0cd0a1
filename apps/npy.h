// Arrays in NumPy's .npy files (format versions 1, 2 and 3): reading and writing, with errors that name the file.
//
// Types: float32, float16, bool, int32, int64 (read as int32 when every value fits), in either byte order. bfloat16 is
// what ml_dtypes writes: type string "<V2"; 16-bit unsigned integers can be taken for bfloat16 bits on request. Fortran
// order is turned into C order. Nothing is allocated before the header has been held against the size of the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <istream>
#include <string>
#include <vector>

#include "dspattn/tensor_view.h"

namespace dspattn::apps {

struct NpyArray {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;  // at most kMaxRank extents
  std::vector<std::byte> bytes;     // C order, this machine's byte order
};

// Whether 16-bit unsigned integers hold the bits of bfloat16 numbers.
enum class Uint16 : std::uint8_t { refused, is_bf16 };

// Throws Error: missing, truncated or overlong file, no .npy, damaged header, type or rank that is not taken.
NpyArray read_npy(const std::filesystem::path& path, Uint16 uint16 = Uint16::refused);

// The same from a stream of `file_bytes` bytes; `name` is for messages.
NpyArray read_npy(std::istream& stream, std::uint64_t file_bytes, const std::string& name,
                  Uint16 uint16 = Uint16::refused);

struct NpyFile {
  std::filesystem::path path;
  NpyArray array;
};

// Format version 1, C order, little endian. All files or none: each is written in full beside its place before the
// first takes it. Throws std::runtime_error when one cannot be written.
void write_npy(const std::vector<NpyFile>& files);

}  // namespace dspattn::apps
