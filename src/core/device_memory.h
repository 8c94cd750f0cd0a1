// Memory of one device, as tests, checks and tools need it: allocate, copy in and out, wait. One implementation per
// kind of device; src/api/device_memory.h finds the one of a Device.
#pragma once

#include <cstddef>
#include <utility>

namespace dspattn::core {

inline constexpr std::size_t kDeviceAlignment = 256;  // of every allocation, as cudaMalloc gives

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual void* allocate(std::size_t bytes) = 0;  // throws Error when there is none
  virtual void release(void* address) noexcept = 0;
  // Both wait for work enqueued before them on the default stream, and until the bytes have arrived.
  virtual void copy_in(void* device, const void* host, std::size_t bytes) = 0;
  virtual void copy_out(void* host, const void* device, std::size_t bytes) = 0;
};

// The CPU's: host memory.
DeviceMemory& host_memory();

// An allocation that frees itself.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceMemory& memory, std::size_t bytes)
      : memory_(&memory), address_(memory.allocate(bytes)), bytes_(bytes) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
    if (memory_ != nullptr) memory_->release(address_);
  }

  void* data() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  void upload(const void* host) { memory_->copy_in(address_, host, bytes_); }
  void download(void* host) const { memory_->copy_out(host, address_, bytes_); }

 private:
  DeviceMemory* memory_ = nullptr;
  void* address_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace dspattn::core
