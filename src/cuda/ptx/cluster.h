// Clusters of any size whose CTAs read each other's shared memory; before Hopper every CTA is a cluster of its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dspattn::cuda::ptx {

// The word at `address` in CTA `rank` of the cluster.
__device__ __forceinline__ float load_cluster(std::uint32_t address, std::uint32_t rank) {
  float value;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there];}"
               : "=f"(value)
               : "r"(address), "r"(rank)
               : "memory");
#else
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
#endif
  return value;
}

// The 16 bytes at `address`, which is a multiple of 16.
__device__ __forceinline__ float4 load_cluster_16(std::uint32_t address, std::uint32_t rank) {
  float4 x;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %4, %5; "
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "r"(address), "r"(rank)
      : "memory");
#else
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
#endif
  return x;
}

// All threads of the cluster; what they wrote to shared memory is visible to all of them.
__device__ __forceinline__ void sync_whole_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
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
