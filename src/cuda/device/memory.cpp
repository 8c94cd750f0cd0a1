#include "cuda/device/memory.h"

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cuda/device/device.h"
#include "dspattn/error.h"

namespace dspattn::cuda {
namespace {

class GpuMemory final : public core::DeviceMemory {
 public:
  explicit GpuMemory(int device) : device_(device) {}

  void* allocate(std::size_t bytes) override {
    check(cudaSetDevice(device_), "selecting device " + std::to_string(device_));
    void* address = nullptr;
    check(cudaMalloc(&address, bytes > 0 ? bytes : 1), "allocating " + std::to_string(bytes) + " bytes");
    return address;
  }
  void release(void* address) noexcept override { cudaFree(address); }
  void copy_in(void* device, const void* host, std::size_t bytes) override {
    check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "copying to the device");
  }
  void copy_out(void* host, const void* device, std::size_t bytes) override {
    // Kernels may run on streams that do not synchronise with the default one.
    check(cudaDeviceSynchronize(), "waiting for the device");
    check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "copying from the device");
  }

 private:
  int device_;
};

}  // namespace

core::DeviceMemory& memory(int device_index) {
  if (const DeviceFacts& facts = device_facts(device_index); !facts.present) {
    throw Error("device: expected a CUDA device of this machine, got cuda:" + std::to_string(device_index) + ": " +
                facts.absence);
  }
  static std::mutex mutex;
  static std::map<int, std::unique_ptr<GpuMemory>> memories;
  const std::lock_guard lock(mutex);
  auto& slot = memories[device_index];
  if (!slot) slot = std::make_unique<GpuMemory>(device_index);
  return *slot;
}

std::vector<std::string> device_names() {
  int count = 0;
  std::vector<std::string> names;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, i), "asking for the properties of device " + std::to_string(i));
    names.emplace_back(properties.name);
  }
  return names;
}

}  // namespace dspattn::cuda
