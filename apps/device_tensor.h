// An array on the device a command works on, with the view that kernels take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "api/device_memory.h"
#include "dspattn/attention.h"

namespace dspattn::apps {

class DeviceTensor {
 public:
  DeviceTensor() = default;
  // Row-major contiguous; uninitialised.
  DeviceTensor(Device device, DType dtype, const std::vector<std::int64_t>& shape)
      : buffer_(api::memory_of(device), bytes_of(dtype, shape)) {
    view_.data = buffer_.data();
    view_.dtype = dtype;
    view_.rank = static_cast<int>(shape.size());
    std::int64_t step = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      view_.shape[i] = shape[i];
      view_.stride[i] = step;
      step *= shape[i];
    }
  }

  const TensorView& view() const { return view_; }
  std::size_t bytes() const { return buffer_.bytes(); }
  void upload(const void* host) { buffer_.upload(host); }
  void download(void* host) const { buffer_.download(host); }

 private:
  static std::size_t bytes_of(DType dtype, const std::vector<std::int64_t>& shape) {
    std::size_t count = size_bytes(dtype);
    for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
    return count;
  }

  core::DeviceBuffer buffer_;
  TensorView view_;
};

}  // namespace dspattn::apps
