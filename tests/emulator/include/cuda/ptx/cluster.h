// Clusters of any size, emulated: they may have up to 16 blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "emulator/machine.h"

namespace dspattn::cuda::ptx {

inline float load_cluster(std::uint32_t address, std::uint32_t rank) {
  float value;
  std::memcpy(&value, emulator::Machine::get().shared(emulator::in_block(address, rank), 4), 4);
  return value;
}

inline float4 load_cluster_16(std::uint32_t address, std::uint32_t rank) {
  float4 value;
  std::memcpy(&value, emulator::Machine::get().shared(emulator::in_block(address, rank), 16), 16);
  return value;
}

inline void sync_whole_cluster() { emulator::Machine::get().cluster_sync(); }

template <typename Kernel>
cudaError_t allow_large_clusters(Kernel) {
  return cudaSuccess;
}

template <typename Kernel>
int room_for_clusters(Kernel, int, int, int) {
  return 0;
}

}  // namespace dspattn::cuda::ptx
