// The header of a .npy file: a Python dictionary literal with the keys descr, fortran_order and shape.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dspattn::apps {

struct NpyHeader {
  std::string descr;  // "<f4", ...
  bool fortran_order = false;
  std::vector<std::int64_t> shape;
};

// Throws Error that says what of the dictionary is wrong; `name` is the file's, for the message.
NpyHeader parse_npy_header(std::string_view text, const std::string& name);

}  // namespace dspattn::apps
