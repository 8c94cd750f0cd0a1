// Clusters of any size, emulated: they may have up to 16 blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "cuda/ptx/barrier.h"
#include "emulator/machine.h"

namespace dspattn::cuda::ptx {

inline void expect_from_cluster(std::uint32_t barrier, int bytes) {
  mbarrier_init(barrier, 1);
  mbarrier_arrive_expect(barrier, bytes);
}
inline void await_from_cluster(std::uint32_t barrier) { mbarrier_wait(barrier, 0); }
// Who arrives waits later, before it ends.
inline void cluster_arrive() {}
inline void cluster_wait() { emulator::Machine::get().cluster_sync(); }

// Happens at some later time.
template <typename Words>
void send(std::uint32_t address, const Words& words, std::uint32_t barrier, std::uint32_t rank) {
  if (address % sizeof(Words) != 0) emulator::Machine::fail("words sent to an address that is not aligned");
  emulator::Machine::get().later(
      [to = emulator::in_block(address, rank), words, there = emulator::in_block(barrier, rank)] {
        std::memcpy(emulator::Machine::get().shared_written_beside(to, sizeof words), &words, sizeof words);
        emulator::Machine::get().mbarrier_delivered(there, sizeof words);
      });
}
inline void send_8(std::uint32_t address, float a, float b, std::uint32_t barrier, std::uint32_t rank) {
  send(address, float2{a, b}, barrier, rank);
}
inline void send_16(std::uint32_t address, const float4& x, std::uint32_t barrier, std::uint32_t rank) {
  send(address, x, barrier, rank);
}

template <typename Kernel>
cudaError_t allow_large_clusters(Kernel) {
  return cudaSuccess;
}

template <typename Kernel>
int room_for_clusters(Kernel, int, int, int) {
  return 0;
}

}  // namespace dspattn::cuda::ptx
