// A strided view of memory the caller owns. Strides are in elements; the last dimension is contiguous in every tensor
// that holds rows of head-dim elements. A stride of 0 broadcasts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "dspattn/dtype.h"
#include "dspattn/error.h"

namespace dspattn {

inline constexpr int kMaxRank = 4;

template <typename Pointer>
struct BasicTensorView {
  Pointer data = nullptr;
  DType dtype = DType::f32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};

  BasicTensorView() = default;
  // Row-major contiguous. Throws Error for more than kMaxRank extents: dropping some would view another tensor.
  BasicTensorView(Pointer pointer, DType type, std::initializer_list<std::int64_t> extents)
      : data(pointer), dtype(type) {
    require_extents(extents.size());
    for (const std::int64_t extent : extents) shape[static_cast<std::size_t>(rank++)] = extent;
    // Extents that no memory holds may wrap around here; validation refuses them by their product.
    std::uint64_t step = 1;
    for (int i = rank - 1; i >= 0; --i) {
      stride[static_cast<std::size_t>(i)] = static_cast<std::int64_t>(step);
      step *= static_cast<std::uint64_t>(shape[static_cast<std::size_t>(i)]);
    }
  }
  // Throws Error unless there is a stride for each extent.
  BasicTensorView(Pointer pointer, DType type, std::initializer_list<std::int64_t> extents,
                  std::initializer_list<std::int64_t> strides)
      : BasicTensorView(pointer, type, extents) {
    if (strides.size() != extents.size()) {
      throw Error("tensor view strides: expected " + std::to_string(extents.size()) + ", one for each extent, got " +
                  std::to_string(strides.size()));
    }
    std::size_t i = 0;
    for (const std::int64_t step : strides) stride[i++] = step;
  }
  template <typename Other>
  BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT: a mutable view is a const view
      : data(other.data), dtype(other.dtype), rank(other.rank), shape(other.shape), stride(other.stride) {}

  // Given, as opposed to left out by the caller. An empty tensor is present: it has a rank.
  bool present() const { return rank > 0; }
  std::int64_t extent(int dim) const { return shape[static_cast<std::size_t>(dim)]; }
  std::int64_t step(int dim) const { return stride[static_cast<std::size_t>(dim)]; }
  std::int64_t elements() const {
    std::int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= extent(i);
    return count;
  }

 private:
  static void require_extents(std::size_t count) {
    if (count <= static_cast<std::size_t>(kMaxRank)) return;
    throw Error("tensor view extents: expected at most " + std::to_string(kMaxRank) + ", got " + std::to_string(count));
  }
};

using TensorView = BasicTensorView<void*>;
using ConstTensorView = BasicTensorView<const void*>;

}  // namespace dspattn
