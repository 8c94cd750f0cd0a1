#include "views.h"

#include <string>

namespace dspattn::torch_binding {
namespace {

// The scalar types a caller may hold by mistake, by name; the numbers are asked of libtorch, never assumed.
std::string scalar_type_name(std::int32_t code) {
  const struct {
    std::int32_t code;
    const char* name;
  } known[] = {
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz"},
      {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_uint64(), "uint64"},
      {aoti_torch_dtype_uint32(), "uint32"},
      {aoti_torch_dtype_uint16(), "uint16"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_complex32(), "complex32"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
  };
  for (const auto& entry : known) {
    if (entry.code == code) return entry.name;
  }
  return "scalar type " + std::to_string(code);
}

std::string device_name(std::int32_t type, std::int32_t index) {
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(index);
  return "device type " + std::to_string(type);
}

std::int32_t device_type_code(const Tensor& tensor) {
  std::int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &code));
  return code;
}

template <typename View, typename Pointer>
View view_of(const Tensor& tensor, Pointer data, std::string_view argument, std::string_view takes = kFloats) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  if (sizes.size() > static_cast<std::size_t>(kMaxRank)) {
    throw Error(std::string(argument) + ": expected at most " + std::to_string(kMaxRank) + " dimensions, got " +
                std::to_string(sizes.size()));
  }
  View view;
  view.data = data;
  view.dtype = dtype_of(tensor, argument, takes);
  view.rank = static_cast<int>(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    view.shape[i] = sizes[i];
    view.stride[i] = strides[i];
  }
  // PyTorch leaves the stride of an extent of 1 (or of an empty tensor) to chance; the library asks for 1 in the last.
  if (view.rank > 0 && sizes[sizes.size() - 1] <= 1) view.stride[sizes.size() - 1] = 1;
  return view;
}

}  // namespace

DType dtype_of(const Tensor& tensor, std::string_view argument, std::string_view takes) {
  std::int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  if (code == aoti_torch_dtype_float32()) return DType::f32;
  if (code == aoti_torch_dtype_bfloat16()) return DType::bf16;
  if (code == aoti_torch_dtype_float16()) return DType::f16;
  if (code == aoti_torch_dtype_bool()) return DType::b8;
  if (code == aoti_torch_dtype_int32()) return DType::i32;
  throw Error(std::string(argument) + ".dtype: expected " + std::string(takes) + ", got " + scalar_type_name(code));
}

Device device_of(const Tensor& tensor, std::string_view argument) {
  const std::int32_t type = device_type_code(tensor);
  const std::int32_t index = tensor.get_device_index();
  if (type == aoti_torch_device_type_cpu()) return {DeviceType::cpu, 0};
  if (type == aoti_torch_device_type_cuda()) return {DeviceType::cuda, index};
  throw Error(std::string(argument) + ": expected a tensor on cpu or cuda, got one on " + device_name(type, index));
}

void require_device(const Tensor& tensor, std::string_view argument, Device device) {
  const Device own = device_of(tensor, argument);
  if (own.type == device.type && own.index == device.index) return;
  const auto text = [](Device d) {
    return d.type == DeviceType::cpu ? std::string("cpu") : "cuda:" + std::to_string(d.index);
  };
  throw Error(std::string(argument) + ": expected a tensor on " + text(device) + " as q is, got one on " + text(own));
}

ConstTensorView const_view(const Tensor& tensor, std::string_view argument, std::string_view takes) {
  return view_of<ConstTensorView>(tensor, tensor.const_data_ptr(), argument, takes);
}

ConstTensorView const_view(const MaybeTensor& tensor, std::string_view argument, std::string_view takes) {
  return tensor ? const_view(*tensor, argument, takes) : ConstTensorView{};
}

TensorView mutable_view(const Tensor& tensor, std::string_view argument) {
  return view_of<TensorView>(tensor, tensor.mutable_data_ptr(), argument);
}

}  // namespace dspattn::torch_binding
