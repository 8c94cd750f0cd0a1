#include "place.h"

#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include <array>
#include <string>

namespace dspattn::torch_binding {
namespace {

constexpr std::size_t kWorkspaceAlignment = 256;  // Execution::workspace

using CurrentStream = AOTITorchError (*)(std::int32_t device_index, void** stream);

// The stable function for the current CUDA stream lives in libtorch_cuda.so, which a CPU-only PyTorch does not have.
// It is looked up in the copy that is already loaded, so that one shared object serves both.
CurrentStream find_current_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = dlsym(library != nullptr ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
  return reinterpret_cast<CurrentStream>(symbol);
}

void* current_cuda_stream(int device_index) {
  static const CurrentStream current_stream = find_current_stream();
  if (current_stream == nullptr) {
    throw Error("device: expected a PyTorch with CUDA for a tensor on cuda:" + std::to_string(device_index) +
                ", got one without aoti_torch_get_current_cuda_stream");
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(current_stream(device_index, &stream));
  return stream;
}

}  // namespace

std::int32_t scalar_type_of(const Tensor& tensor) {
  std::int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

Tensor empty_like_strided(const Tensor& like, std::int32_t scalar_type, std::initializer_list<std::int64_t> sizes,
                          std::initializer_list<int> order) {
  std::array<std::int64_t, kMaxRank> extents{};
  std::array<std::int64_t, kMaxRank> strides{};
  std::size_t rank = 0;
  for (const std::int64_t size : sizes) extents[rank++] = size;
  std::int64_t step = 1;
  for (auto dim = std::rbegin(order); dim != std::rend(order); ++dim) {
    const auto i = static_cast<std::size_t>(*dim);
    strides[i] = step;
    step *= extents[i] > 1 ? extents[i] : 1;  // as torch: an extent of 0 does not zero the strides above it
  }
  std::int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<std::int64_t>(rank), extents.data(), strides.data(),
                                                  scalar_type, device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

namespace {

// PyTorch's own threads: they still spin after its last parallel region, on the cores a second pool would need.
void run_on_torch_threads(void*, int seats, void (*work)(void* loop), void* loop) {
  struct Call {
    void (*work)(void* loop);
    void* loop;
  } call{work, loop};
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(
      0, seats, 1,
      [](std::int64_t begin, std::int64_t end, void* pointer) {
        const Call& mine = *static_cast<Call*>(pointer);
        for (std::int64_t seat = begin; seat < end; ++seat) mine.work(mine.loop);
      },
      &call));
}

}  // namespace

Execution execution_on(Device device) {
  Execution run;
  if (device.type == DeviceType::cuda) {
    run.stream = current_cuda_stream(device.index);
  } else {
    std::uint32_t threads = 0;
    TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
    run.threads = static_cast<int>(threads);
    run.team.run = run_on_torch_threads;
  }
  return run;
}

Workspace::Workspace(const Tensor& like, std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const auto padded = static_cast<std::int64_t>(bytes + kWorkspaceAlignment);
  memory_ = empty_like_strided(like, aoti_torch_dtype_uint8(), {padded}, {0});
}

void* Workspace::address() const {
  if (!memory_) return nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(memory_->mutable_data_ptr());
  return reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment);
}

}  // namespace dspattn::torch_binding
