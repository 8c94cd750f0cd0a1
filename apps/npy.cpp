#include "apps/npy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <fstream>
#include <limits>
#include <string_view>
#include <system_error>

#include "apps/npy_header.h"
#include "dspattn/error.h"

namespace dspattn::apps {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::uint64_t kPreambleBytes = 8;                        // magic and version
constexpr std::uint64_t kMaxHeaderBytes = std::uint64_t{1} << 20;  // a header of four extents takes about 118

// How the elements lie in the file.
struct FileType {
  DType dtype = DType::f32;
  std::size_t item_bytes = 0;
  bool swapped = false;  // the other byte order
  bool wide = false;     // int64, to be narrowed to int32
  bool truth = false;    // integers that are truth values
};

// The bytes of an integer type ("i8", "u1", ...), or 0 for any other.
std::size_t integer_bytes(const std::string& kind) {
  if (kind.size() != 2 || (kind[0] != 'i' && kind[0] != 'u' && kind != "b1")) return 0;
  const std::size_t bytes = static_cast<std::size_t>(kind[1]) - '0';
  return bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 ? bytes : 0;
}

FileType file_type(const std::string& descr, NpyUse use, const std::string& name) {
  const char order = descr.empty() ? '?' : descr[0];
  const bool little = std::endian::native == std::endian::little;
  FileType type;
  type.swapped = order == (little ? '>' : '<');
  const std::string kind = descr.empty() ? "" : descr.substr(1);
  if (use == NpyUse::mask && integer_bytes(kind) > 0) {
    type.dtype = DType::b8;
    type.truth = true;
  } else if (kind == "f4") {
    type.dtype = DType::f32;
  } else if (kind == "f2") {
    type.dtype = DType::f16;
  } else if (kind == "V2" || (kind == "u2" && use == NpyUse::bf16_bits)) {
    type.dtype = DType::bf16;
  } else if (kind == "i4") {
    type.dtype = DType::i32;
  } else if (kind == "i8") {
    type.dtype = DType::i32;
    type.wide = true;
  } else if (kind == "b1") {
    type.dtype = DType::b8;
  } else {
    throw Error(name + ": type: expected float32, float16, bfloat16 (\"<V2\"), bool, int32 or int64, got \"" +
                descr.substr(0, 20) + "\"" +
                (kind == "f8" ? "; save it as float32: numpy.save(file, array.astype(numpy.float32))" : "") +
                (kind == "u2" ? "; --dtype bf16 takes 16-bit integers for bfloat16 bits" : ""));
  }
  if (order != '<' && order != '>' && order != '=' && order != '|') {
    throw Error(name + ": type: expected a byte order among <, >, = and |, got \"" + descr.substr(0, 20) + "\"");
  }
  type.item_bytes = type.truth ? integer_bytes(kind) : type.wide ? 8 : size_bytes(type.dtype);
  return type;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (const std::int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + ")";
}

// Bytes the array takes, held against those the file has left.
std::uint64_t data_bytes(const NpyHeader& header, std::size_t item_bytes, std::uint64_t left, const std::string& name) {
  std::uint64_t total = item_bytes;
  for (const std::int64_t extent : header.shape) {
    const auto factor = static_cast<std::uint64_t>(extent);
    if (factor != 0 && total > std::numeric_limits<std::uint64_t>::max() / factor) {
      throw Error(name + ": shape " + shape_text(header.shape) + " is larger than any file");
    }
    total *= factor;
  }
  if (total > left) {
    throw Error(name + ": truncated: expected " + std::to_string(total) + " bytes of data for shape " +
                shape_text(header.shape) + ", got " + std::to_string(left));
  }
  if (total < left) {
    throw Error(name + ": too long: expected " + std::to_string(total) + " bytes of data for shape " +
                shape_text(header.shape) + ", got " + std::to_string(left));
  }
  return total;
}

void read_exactly(std::istream& stream, void* into, std::uint64_t count, const std::string& name) {
  stream.read(static_cast<char*>(into), static_cast<std::streamsize>(count));
  if (static_cast<std::uint64_t>(stream.gcount()) != count) {
    throw Error(name + ": truncated: expected " + std::to_string(count) + " more bytes, got " +
                std::to_string(stream.gcount()));
  }
}

std::uint64_t little_endian(const std::array<unsigned char, 4>& bytes, int count) {
  std::uint64_t value = 0;
  for (int i = count - 1; i >= 0; --i) value = value << 8 | bytes[static_cast<std::size_t>(i)];
  return value;
}

NpyHeader read_header(std::istream& stream, std::uint64_t& left, const std::string& name) {
  if (left < kPreambleBytes)
    throw Error(name + ": expected a .npy file, got one of " + std::to_string(left) + " bytes");
  std::array<char, kPreambleBytes> preamble{};
  read_exactly(stream, preamble.data(), preamble.size(), name);
  if (std::string_view(preamble.data(), kMagic.size()) != kMagic) {
    throw Error(name + ": expected a .npy file, got something else (it does not start with \"\\x93NUMPY\")");
  }
  const int version = static_cast<unsigned char>(preamble[6]);
  if (version < 1 || version > 3) {
    throw Error(name + ": .npy version: expected 1, 2 or 3, got " + std::to_string(version));
  }
  left -= kPreambleBytes;
  const int length_bytes = version == 1 ? 2 : 4;
  if (left < static_cast<std::uint64_t>(length_bytes)) throw Error(name + ": truncated: the header has no length");
  std::array<unsigned char, 4> length{};
  read_exactly(stream, length.data(), static_cast<std::uint64_t>(length_bytes), name);
  left -= static_cast<std::uint64_t>(length_bytes);
  const std::uint64_t header_bytes = little_endian(length, length_bytes);
  if (header_bytes > left || header_bytes > kMaxHeaderBytes) {
    throw Error(name + ": header length: expected at most " + std::to_string(std::min(left, kMaxHeaderBytes)) +
                " bytes, got " + std::to_string(header_bytes));
  }
  std::string text(static_cast<std::size_t>(header_bytes), '\0');
  read_exactly(stream, text.data(), header_bytes, name);
  left -= header_bytes;
  return parse_npy_header(text, name);
}

void swap_bytes(std::vector<std::byte>& bytes, std::size_t item_bytes) {
  for (auto item = bytes.begin(); item != bytes.end(); item += static_cast<std::ptrdiff_t>(item_bytes)) {
    std::reverse(item, item + static_cast<std::ptrdiff_t>(item_bytes));
  }
}

// Column-major to row-major.
std::vector<std::byte> transposed(const std::vector<std::byte>& bytes, const std::vector<std::int64_t>& shape,
                                  std::size_t item_bytes) {
  std::vector<std::byte> result(bytes.size());
  std::vector<std::int64_t> index(shape.size(), 0);
  for (std::size_t to = 0; to < bytes.size(); to += item_bytes) {
    std::int64_t from = 0;
    for (std::size_t dim = shape.size(); dim-- > 0;) from = from * shape[dim] + index[dim];
    std::memcpy(&result[to], &bytes[static_cast<std::size_t>(from) * item_bytes], item_bytes);
    for (std::size_t dim = shape.size(); dim-- > 0 && ++index[dim] == shape[dim];) index[dim] = 0;
  }
  return result;
}

std::vector<std::byte> narrowed(const std::vector<std::byte>& bytes, const std::string& name) {
  std::vector<std::byte> result(bytes.size() / 2);
  for (std::size_t i = 0; i < bytes.size() / 8; ++i) {
    std::int64_t value = 0;
    std::memcpy(&value, &bytes[8 * i], 8);
    if (value != static_cast<std::int32_t>(value)) {
      throw Error(name + ": expected integers of 32 bits, got " + std::to_string(value));
    }
    const auto narrow = static_cast<std::int32_t>(value);
    std::memcpy(&result[4 * i], &narrow, 4);
  }
  return result;
}

// One byte an integer: 1 where it is not 0.
std::vector<std::byte> truth_values(const std::vector<std::byte>& bytes, std::size_t item_bytes) {
  std::vector<std::byte> result(bytes.size() / item_bytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != std::byte{0}) result[i / item_bytes] = std::byte{1};
  }
  return result;
}

}  // namespace

NpyArray read_npy(std::istream& stream, std::uint64_t file_bytes, const std::string& name, NpyUse use) {
  std::uint64_t left = file_bytes;
  const NpyHeader header = read_header(stream, left, name);
  const FileType type = file_type(header.descr, use, name);
  if (header.shape.size() > static_cast<std::size_t>(kMaxRank)) {
    throw Error(name + ": expected at most " + std::to_string(kMaxRank) + " dimensions, got shape " +
                shape_text(header.shape));
  }
  NpyArray array;
  array.dtype = type.dtype;
  array.shape = header.shape;
  array.bytes.resize(data_bytes(header, type.item_bytes, left, name));
  read_exactly(stream, array.bytes.data(), array.bytes.size(), name);
  if (type.swapped && type.item_bytes > 1) swap_bytes(array.bytes, type.item_bytes);
  if (header.fortran_order && array.shape.size() > 1) {
    array.bytes = transposed(array.bytes, array.shape, type.item_bytes);
  }
  if (type.wide) array.bytes = narrowed(array.bytes, name);
  if (type.truth) array.bytes = truth_values(array.bytes, type.item_bytes);
  return array;
}

NpyArray read_npy(const std::filesystem::path& path, NpyUse use) {
  const std::string name = path.string();
  std::error_code code;
  const std::filesystem::file_status status = std::filesystem::status(path, code);
  if (status.type() == std::filesystem::file_type::not_found) throw Error(name + ": no such file");
  if (status.type() != std::filesystem::file_type::regular) throw Error(name + ": expected a regular file");
  const std::uint64_t file_bytes = std::filesystem::file_size(path, code);
  if (code) throw Error(name + ": " + code.message());
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw Error(name + ": cannot be opened for reading");
  return read_npy(stream, file_bytes, name, use);
}

void write_npy(std::ostream& stream, const NpyArray& array) {
  static_assert(std::endian::native == std::endian::little, "the writer declares its bytes to be little endian");
  constexpr std::array<std::string_view, 5> kDescr = {"<f4", "<f2", "<V2", "<i4", "|b1"};  // in the order of DType
  constexpr std::size_t kAlignment = 64;                                                   // NumPy aligns the data so
  std::string shape;
  for (const std::int64_t extent : array.shape) shape += std::to_string(extent) + ", ";
  std::string header = "{'descr': '" + std::string(kDescr[static_cast<std::size_t>(array.dtype)]) +
                       "', 'fortran_order': False, 'shape': (" + shape + "), }";
  const std::size_t before = kPreambleBytes + 2;
  header.append(kAlignment - 1 - (before + header.size()) % kAlignment, ' ');
  header += '\n';
  stream << kMagic << '\x01' << '\0' << static_cast<char>(header.size() & 0xff) << static_cast<char>(header.size() >> 8)
         << header;
  stream.write(reinterpret_cast<const char*>(array.bytes.data()), static_cast<std::streamsize>(array.bytes.size()));
}

}  // namespace dspattn::apps
