// Clusters of any size whose CTAs write to each other's shared memory; before Hopper every CTA is a cluster of its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/barrier.h"

namespace dspattn::cuda::ptx {

// CTAs send each other words: a thread of the receiver says once how many bytes are to come to a barrier of its shared
// memory; when they are there, its phase 0 is complete. A release of all that a thread wrote, as a barrier of the
// cluster is, waits for its writes to global memory too, which takes long.
__device__ __forceinline__ void expect_from_cluster(std::uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  mbarrier_init(barrier, 1);
  mbarrier_arrive_expect(barrier, bytes);
  mbarrier_init_fence();
#endif
}
__device__ __forceinline__ void await_from_cluster(std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  mbarrier_wait(barrier, 0);
#endif
}
// All threads of the cluster arrive once and wait later: then every CTA's barriers are there.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// To `address` of CTA `rank`, and its barrier that lies where `barrier` does. Does not wait.
__device__ __forceinline__ void send_8(std::uint32_t address, float a, float b, std::uint32_t barrier,
                                       std::uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b32 to, there; mapa.shared::cluster.u32 to, %0, %4; mapa.shared::cluster.u32 there, %3, %4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%1, %2}, [there];}" ::"r"(address),
      "f"(a), "f"(b), "r"(barrier), "r"(rank)
      : "memory");
#endif
}
__device__ __forceinline__ void send_16(std::uint32_t address, const float4& x, std::uint32_t barrier,
                                        std::uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b32 to, there; mapa.shared::cluster.u32 to, %0, %6; mapa.shared::cluster.u32 there, %5, %6;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%1, %2, %3, %4}, [there];}" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier), "r"(rank)
      : "memory");
#endif
}

// Lets a kernel be launched in clusters of more than the 8 CTAs that every card with clusters has room for. Cheap, and
// allowed during graph capture.
template <typename Kernel>
cudaError_t allow_large_clusters(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// Clusters of `ctas` CTAs that the current device has room for at once; 0 where it does not say. Cheap, and allowed
// during graph capture.
template <typename Kernel>
int room_for_clusters(Kernel kernel, int ctas, int threads, int shared_bytes) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = {static_cast<unsigned>(ctas), 1, 1};
  config.blockDim = {static_cast<unsigned>(threads), 1, 1};
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess) return clusters;
  cudaGetLastError();  // must not be found by a later launch
  return 0;
}

}  // namespace dspattn::cuda::ptx
