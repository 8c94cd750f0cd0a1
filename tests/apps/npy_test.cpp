// The .npy reader on what NumPy cannot be made to write, and the writer read back. Files that NumPy writes are in
// tests/cli/test_run.py.
#include "apps/npy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "dspattn/error.h"

namespace dspattn::apps {
namespace {

std::string file_with(const std::string& header, const std::string& data) {
  std::string file("\x93NUMPY\x01\x00", 8);
  file += static_cast<char>(header.size() & 0xff);
  file += static_cast<char>(header.size() >> 8);
  return file + header + data;
}

NpyArray read(const std::string& file, NpyUse use = NpyUse::numbers) {
  std::istringstream stream(file);
  return read_npy(stream, file.size(), "a.npy", use);
}

std::string refusal(const std::string& file) {
  try {
    read(file);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Npy, HeaderInAnyOrderWithDoubleQuotesAndLongIntegers) {
  const NpyArray array =
      read(file_with("{\"shape\":(2L,1),\n\"fortran_order\":False,\"descr\":\"|b1\"}\n", "\x01\x02"));
  EXPECT_EQ(array.dtype, DType::b8);
  EXPECT_EQ(array.shape, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(array.bytes.size(), 2u);
}

TEST(Npy, ScalarAndEmptyArrays) {
  EXPECT_TRUE(read(file_with("{'descr': '<f4', 'fortran_order': False, 'shape': ()}", "abcd")).shape.empty());
  EXPECT_TRUE(read(file_with("{'descr': '<f4', 'fortran_order': True, 'shape': (3, 0)}", "")).bytes.empty());
}

TEST(Npy, WideIntegersMustFit) {
  std::string data(8, '\0');
  data[0] = 7;
  const std::string header = "{'descr': '<i8', 'fortran_order': False, 'shape': (1,)}";
  const NpyArray array = read(file_with(header, data));
  EXPECT_EQ(array.dtype, DType::i32);
  std::int32_t value = 0;
  std::memcpy(&value, array.bytes.data(), 4);
  EXPECT_EQ(value, 7);
  data[5] = 1;
  EXPECT_NE(refusal(file_with(header, data)).find("a.npy: expected integers of 32 bits, got 1099511627783"),
            std::string::npos);
}

TEST(Npy, IntegersOfAMaskAreTruthValues) {
  const std::vector<std::byte> expected{std::byte{0}, std::byte{1}, std::byte{1}};
  for (const char* kind : {"|b1", "|u1", "|i1"}) {
    const std::string header = std::string("{'descr': '") + kind + "', 'fortran_order': False, 'shape': (3,)}";
    const NpyArray array = read(file_with(header, std::string("\x00\x02\xff", 3)), NpyUse::mask);
    EXPECT_EQ(array.dtype, DType::b8);
    EXPECT_EQ(array.bytes, expected);
  }
  for (const char* kind : {"<i2", ">u2", "<i4", "<u4", "<i8", ">i8", "<u8"}) {
    const auto bytes = static_cast<std::size_t>(kind[2] - '0');
    std::string data(3 * bytes, '\0');
    data[bytes] = 1;
    data[3 * bytes - 1] = 4;
    const std::string header = std::string("{'descr': '") + kind + "', 'fortran_order': False, 'shape': (3,)}";
    EXPECT_EQ(read(file_with(header, data), NpyUse::mask).bytes, expected) << kind;
  }
  EXPECT_NE(refusal(file_with("{'descr': '|u1', 'fortran_order': False, 'shape': (1,)}", "a")).find("got \"|u1\""),
            std::string::npos);
}

TEST(Npy, DamagedHeaders) {
  for (const char* header :
       {"", "{", "{}", "{'descr': '<f4'", "{'descr: '<f4'}", "{'descr': '<f4', 'descr': '<f4'}",
        "{'descr': '<f4', 'fortran_order': Maybe, 'shape': ()}", "{'descr': '<f4', 'fortran_order': False, 'shape': (1",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': ()} x", "{'descr': '', 'fortran_order': False, 'shape': ()}",
        "{'descr': 'xf4', 'fortran_order': False, 'shape': ()}"}) {
    EXPECT_TRUE(refusal(file_with(header, "abcd")).starts_with("a.npy: ")) << header;
  }
}

TEST(Npy, WrittenFilesReadBack) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i32, DType::b8}) {
    for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{}, {5}, {2, 3, 1, 4}, {0, 3}}) {
      NpyArray array{dtype, shape, {}};
      std::size_t size = size_bytes(dtype);
      for (const std::int64_t extent : shape) size *= static_cast<std::size_t>(extent);
      for (std::size_t i = 0; i < size; ++i) array.bytes.push_back(static_cast<std::byte>(i));
      std::ostringstream file;
      write_npy(file, array);
      const NpyArray back = read(file.str());
      EXPECT_EQ(back.dtype, dtype);
      EXPECT_EQ(back.shape, shape);
      EXPECT_EQ(back.bytes, array.bytes);
    }
  }
}

}  // namespace
}  // namespace dspattn::apps
