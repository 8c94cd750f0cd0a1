#include "cuda/device/device.h"

#include <mutex>
#include <vector>

#include "dspattn/error.h"

namespace dspattn::cuda {
namespace {

std::vector<DeviceFacts> query_devices(std::string& absence) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    absence = "no CUDA device (" +
              std::string(error != cudaSuccess ? cudaGetErrorString(error) : "the driver reports none") + ")";
    cudaGetLastError();  // not the next call's error
    return {};
  }
  std::vector<DeviceFacts> devices(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    DeviceFacts& facts = devices[static_cast<std::size_t>(i)];
    facts.present =
        cudaDeviceGetAttribute(&facts.major, cudaDevAttrComputeCapabilityMajor, i) == cudaSuccess &&
        cudaDeviceGetAttribute(&facts.minor, cudaDevAttrComputeCapabilityMinor, i) == cudaSuccess &&
        cudaDeviceGetAttribute(&facts.multiprocessors, cudaDevAttrMultiProcessorCount, i) == cudaSuccess &&
        cudaDeviceGetAttribute(&facts.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, i) == cudaSuccess;
    if (!facts.present) facts.absence = "CUDA device " + std::to_string(i) + " does not answer";
  }
  return devices;
}

}  // namespace

const DeviceFacts& device_facts(int index) {
  static std::string absence;
  static const std::vector<DeviceFacts> devices = query_devices(absence);
  if (index >= 0 && static_cast<std::size_t>(index) < devices.size()) return devices[static_cast<std::size_t>(index)];
  static const DeviceFacts none{.absence = absence.empty() ? "expected one of " + std::to_string(devices.size()) +
                                                                 " CUDA devices, got another index"
                                                           : absence};
  return none;
}

void check(cudaError_t error, const std::string& attempted) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // must not be found by a later launch
  throw Error("cuda: " + attempted + ": " + cudaGetErrorString(error));
}

CurrentDevice::CurrentDevice(int index) {
  check(cudaGetDevice(&previous_), "asking for the current device");
  if (previous_ != index) {
    check(cudaSetDevice(index), "selecting device " + std::to_string(index));
    changed_ = true;
  }
}

const DeviceFacts& current_device_facts() {
  int index = 0;
  check(cudaGetDevice(&index), "asking for the current device");
  return device_facts(index);
}

unsigned grid_of(std::int64_t ctas) {
  constexpr std::int64_t kMaxGrid = (std::int64_t{1} << 31) - 1;
  if (ctas > kMaxGrid) {
    throw Error("batch, heads, n_q: expected at most " + std::to_string(kMaxGrid) + " CTAs, got " +
                std::to_string(ctas));
  }
  return static_cast<unsigned>(ctas);
}

CurrentDevice::~CurrentDevice() {
  if (changed_) cudaSetDevice(previous_);
}

}  // namespace dspattn::cuda
