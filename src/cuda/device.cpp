#include "cuda/device.h"

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
    facts.present = cudaDeviceGetAttribute(&facts.major, cudaDevAttrComputeCapabilityMajor, i) == cudaSuccess &&
                    cudaDeviceGetAttribute(&facts.minor, cudaDevAttrComputeCapabilityMinor, i) == cudaSuccess &&
                    cudaDeviceGetAttribute(&facts.multiprocessors, cudaDevAttrMultiProcessorCount, i) == cudaSuccess;
    if (!facts.present) facts.absence = "CUDA device " + std::to_string(i) + " does not answer";
  }
  return devices;
}

}  // namespace

const DeviceFacts& device_facts(int index) {
  static std::string absence;
  static const std::vector<DeviceFacts> devices = query_devices(absence);
  if (index >= 0 && static_cast<std::size_t>(index) < devices.size()) return devices[static_cast<std::size_t>(index)];
  static const DeviceFacts none{false, absence.empty() ? "no CUDA device of that index" : absence, 0, 0, 0};
  return none;
}

void check(cudaError_t error, const char* attempted) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw Error(std::string(attempted) + ": " + cudaGetErrorString(error));
}

CurrentDevice::CurrentDevice(int index) {
  check(cudaGetDevice(&previous_), "asking for the current CUDA device");
  if (previous_ != index) {
    check(cudaSetDevice(index), "selecting the CUDA device");
    changed_ = true;
  }
}

CurrentDevice::~CurrentDevice() {
  if (changed_) cudaSetDevice(previous_);
}

}  // namespace dspattn::cuda
