// The arguments of a boxed operator, taken off PyTorch's stack one after the other in the order of the schema.
//
// Every argument must be taken before anything can throw: taking one also takes over its memory.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "dspattn/error.h"
#include "dspattn/pattern.h"
#include "views.h"

namespace dspattn::torch_binding {

// keep and group as the operator was given them.
struct PatternNumbers {
  std::int64_t keep, group;

  // Throws for a pattern that no function serves: the library counts in int, and 2^32 + 2 must not pass for 2.
  Pattern checked() const {
    if (keep < 1 || keep > group || group > kMaxGroup) {
      throw Error("pattern: expected N:M with 1 <= N <= M <= " + std::to_string(kMaxGroup) + ", got " +
                  std::to_string(keep) + ":" + std::to_string(group));
    }
    return {static_cast<int>(keep), static_cast<int>(group)};
  }
};

class Stack {
 public:
  explicit Stack(StableIValue* values) : values_(values) {}

  template <typename T>
  T take() {
    return torch::stable::detail::to<T>(values_[next_++]);
  }

  Tensor tensor() { return take<Tensor>(); }
  MaybeTensor maybe_tensor() { return take<MaybeTensor>(); }
  bool boolean() { return take<bool>(); }
  std::int64_t integer() { return take<std::int64_t>(); }
  PatternNumbers pattern() {
    const std::int64_t keep = integer();
    return {keep, integer()};
  }
  std::optional<std::int64_t> maybe_integer() { return take<std::optional<std::int64_t>>(); }
  std::optional<double> maybe_real() { return take<std::optional<double>>(); }

  // The header's own conversion to std::string (torch 2.10 to 2.13) never frees the string it makes.
  std::string text() {
    const StringHandle handle = take<StringHandle>();
    std::size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string copy(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return copy;
  }

  template <typename T>
  void read(T& into) {
    into = take<T>();
  }
  void read(std::string& into) { into = text(); }

  template <typename... T>
  void give(const T&... results) {
    std::size_t i = 0;
    ((values_[i++] = torch::stable::detail::from(results)), ...);
  }

 private:
  StableIValue* values_;
  std::size_t next_ = 0;
};

inline constexpr const char* kErrorPrefix = "dspattn: ";  // python/dspattn/_ops.py looks for it

// The operator that PyTorch calls. An error of the library reaches Python as a RuntimeError whose text starts with
// kErrorPrefix and has one reason per line.
template <void (*Run)(Stack&)>
void boxed(StableIValue* values, std::uint64_t, std::uint64_t) {
  Stack stack(values);
  try {
    Run(stack);
  } catch (const Error& error) {
    throw std::runtime_error(std::string(kErrorPrefix) + error.what());
  }
}

// Of the flag that operators take.
inline Grouping grouping_of(bool interleaved) { return interleaved ? Grouping::interleaved : Grouping::consecutive; }

}  // namespace dspattn::torch_binding
