// Tensors of PyTorch's stable ABI as the library's views. Nothing is computed, copied or moved here.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "dspattn/attention.h"

namespace dspattn::torch_binding {

using Tensor = torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// What an argument takes, for the error when it is given a type the library does not have at all. Which of its own
// types an argument takes is the library's to check.
inline constexpr std::string_view kFloats = "float32, float16 or bfloat16";

// The library's element type of a tensor. Throws dspattn::Error naming the argument for any other type.
DType dtype_of(const Tensor& tensor, std::string_view argument, std::string_view takes = kFloats);

// The device of a tensor. Throws dspattn::Error for anything but CPU and CUDA.
Device device_of(const Tensor& tensor, std::string_view argument);

// Throws dspattn::Error when the tensor does not live on the device of q.
void require_device(const Tensor& tensor, std::string_view argument, Device device);

// Throws dspattn::Error when the tensor has more than kMaxRank dimensions.
ConstTensorView const_view(const Tensor& tensor, std::string_view argument, std::string_view takes = kFloats);
ConstTensorView const_view(const MaybeTensor& tensor, std::string_view argument, std::string_view takes = kFloats);
TensorView mutable_view(const Tensor& tensor, std::string_view argument);

}  // namespace dspattn::torch_binding
