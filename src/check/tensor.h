// A tensor that owns its memory twice: on the host, where the checks read it, and on the device, where kernels do.
// Everything that is not an element (guards around the tensor, gaps between strided rows) is filled with 0xff, which is
// NaN in every floating type; so are the elements of an output until a kernel writes them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "check/case.h"
#include "core/device_memory.h"
#include "dspattn/tensor_view.h"

namespace dspattn::check {

class Tensor {
 public:
  Tensor() = default;
  // `view` gives type, extents and strides; its data is ignored. `offset_elems` moves the tensor off alignment.
  Tensor(core::DeviceMemory& memory, const ConstTensorView& view, std::int64_t offset_elems = 0);

  TensorView device_view() const { return view_at(static_cast<std::byte*>(device_.data()) + begin_bytes_); }
  ConstTensorView host_view() const { return view_at(const_cast<std::byte*>(host_.data()) + begin_bytes_); }
  bool present() const { return view_.present(); }

  // Sets every element in row-major order of its indices, on the host.
  void fill(const std::function<double(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>& value);
  void poison();  // every byte 0xff, on the host
  void upload() { device_.upload(host_.data()); }
  void download() { device_.download(host_.data()); }

  double at(std::int64_t i0, std::int64_t i1 = 0, std::int64_t i2 = 0, std::int64_t i3 = 0) const;
  bool is_poisoned(std::int64_t i0, std::int64_t i1 = 0, std::int64_t i2 = 0, std::int64_t i3 = 0) const;
  void set(double value, std::int64_t i0, std::int64_t i1 = 0, std::int64_t i2 = 0, std::int64_t i3 = 0);
  // Whether all bytes that are no element still hold 0xff.
  bool surroundings_intact() const;
  const std::vector<std::byte>& bytes() const { return host_; }

 private:
  TensorView view_at(std::byte* data) const;
  std::int64_t offset(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) const;
  void each_index(const std::function<void(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>& call) const;

  ConstTensorView view_;
  std::size_t begin_bytes_ = 0;
  std::vector<std::byte> host_;
  core::DeviceBuffer device_;
};

// A view without data of [batch, heads, rows, width] in a layout.
ConstTensorView laid_out(DType dtype, std::array<std::int64_t, 4> shape, Layout layout);

}  // namespace dspattn::check
