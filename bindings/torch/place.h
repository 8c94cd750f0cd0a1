// Where an operator runs: memory from PyTorch's allocators, the device of the tensors, PyTorch's current stream and
// thread count.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include "dspattn/attention.h"
#include "views.h"

namespace dspattn::torch_binding {

// An uninitialised tensor on the device (and, unless `like_type` is false, of the type) of `like`, laid out so that
// the dimension listed last in `order` is contiguous.
Tensor empty_like_strided(const Tensor& like, std::int32_t scalar_type, std::initializer_list<std::int64_t> sizes,
                          std::initializer_list<int> order);

std::int32_t scalar_type_of(const Tensor& tensor);

// Makes a GPU current for the lifetime of the object; does nothing for the CPU.
class DeviceScope {
 public:
  explicit DeviceScope(Device device) {
    if (device.type == DeviceType::cuda) guard_.emplace(device.index);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// PyTorch's current stream of the device; its CPU threads and how many it may use.
Execution execution_on(Device device);

// Memory of at least `bytes`, aligned as Execution::workspace asks, owned by the object.
class Workspace {
 public:
  Workspace(const Tensor& like, std::size_t bytes);
  void* address() const;  // null: of no bytes
  std::size_t bytes() const { return bytes_; }

 private:
  std::optional<Tensor> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace dspattn::torch_binding
