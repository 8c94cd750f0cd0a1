#include "core/device_memory.h"

#include <cstring>
#include <limits>
#include <new>

namespace dspattn::core {
namespace {

class HostMemory final : public DeviceMemory {
 public:
  void* allocate(std::size_t bytes) override {
    // Near its largest number the size is rounded up to 0 in there.
    if (bytes > std::numeric_limits<std::size_t>::max() / 2) throw std::bad_alloc();
    return ::operator new (bytes, std::align_val_t{kDeviceAlignment});
  }
  void release(void* address) noexcept override { ::operator delete (address, std::align_val_t{kDeviceAlignment}); }
  void copy_in(void* device, const void* host, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }
  void copy_out(void* host, const void* device, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }
};

}  // namespace

DeviceMemory& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace dspattn::core
