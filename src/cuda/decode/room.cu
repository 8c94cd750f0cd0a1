// How many clusters the current device has room for at once: asked of the driver, since cards of a kind differ.
#include "cuda/decode/launch.h"
#include "cuda/device/device.h"
#include "cuda/ptx/cluster.h"

namespace dspattn::cuda::decode {
namespace {

__global__ void __launch_bounds__(32 * kMaxWarps, 1) fill_multiprocessor() {}

}  // namespace

int room_for_clusters(int ctas) {
  const int shared_bytes = current_device_facts().shared_bytes;
  allow_shared_memory(fill_multiprocessor, shared_bytes);
  check(ptx::allow_large_clusters(fill_multiprocessor), "allowing large clusters");
  return ptx::room_for_clusters(fill_multiprocessor, ctas, 32 * kMaxWarps, shared_bytes);
}

}  // namespace dspattn::cuda::decode
