// Memory access by address, asynchronous copies, mbarrier objects, named barriers, emulated.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/address.h"
#include "emulator/copy_engine.h"
#include "emulator/device.h"
#include "emulator/machine.h"

namespace dspattn::cuda::ptx {

using emulator::Machine;

template <typename T>
T load_from(std::uint32_t address) {
  if (address % sizeof(T) != 0) Machine::fail("a load from an address that is not aligned");
  T value;
  std::memcpy(&value, Machine::get().shared(address, sizeof(T)), sizeof(T));
  return value;
}
template <typename T>
void store_to(std::uint32_t address, const T& value) {
  if (address % sizeof(T) != 0) Machine::fail("a store to an address that is not aligned");
  std::memcpy(Machine::get().shared(address, sizeof(T)), &value, sizeof(T));
  Machine::get().stored(address, sizeof(T), Machine::get().thread());
}

inline std::uint32_t load_shared(std::uint32_t address) { return load_from<std::uint32_t>(address); }

template <int kBytes>
void load_shared_bytes(std::uint32_t address, std::uint32_t (&words)[(kBytes + 3) / 4]) {
  if (address % kBytes != 0) Machine::fail("a load from an address that is not aligned");
  std::memset(words, 0, sizeof words);
  std::memcpy(words, Machine::get().shared(address, kBytes), kBytes);
}

inline void store_shared(std::uint32_t address, std::uint32_t value) { store_to(address, value); }
inline void store_shared_16(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  store_to(address, uint4{a, b, c, d});
}
inline float4 load_shared_16(std::uint32_t address) { return load_from<float4>(address); }

// Lane l's address is that of row l % 8 of matrix l / 8; of that row lane 4 (l % 8) + i has elements 2i and 2i + 1.
inline void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  if (address % 16 != 0) Machine::fail("a matrix at an address that is not aligned");
  const std::array<std::uint32_t, 4> words{a, b, c, d};
  const auto addresses = Machine::get().exchange(address, "stmatrix");
  const int lane = Machine::get().thread() % 32;
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto row = static_cast<std::uint32_t>(addresses[static_cast<std::size_t>(8 * matrix + lane / 4)]);
    store_shared(row + 4 * static_cast<std::uint32_t>(lane % 4), words[static_cast<std::size_t>(matrix)]);
  }
}

inline void load_matrices(std::uint32_t address, std::uint32_t (&words)[4]) {
  if (address % 16 != 0) Machine::fail("a matrix at an address that is not aligned");
  const auto addresses = Machine::get().exchange(address, "ldmatrix");
  const int lane = Machine::get().thread() % 32;
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto row = static_cast<std::uint32_t>(addresses[static_cast<std::size_t>(8 * matrix + lane / 4)]);
    words[matrix] = load_shared(row + 4 * static_cast<std::uint32_t>(lane % 4));
  }
}

inline void store_global_8(void* address, float a, float b) {
  const float2 value{a, b};
  if (reinterpret_cast<std::uintptr_t>(address) % 8 != 0) Machine::fail("8 bytes to an address that is not aligned");
  std::memcpy(address, &value, 8);
}
inline void store_global_16(void* address, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  const uint4 value{a, b, c, d};
  if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0) Machine::fail("16 bytes to an address that is not aligned");
  std::memcpy(address, &value, 16);
}

inline void copy_async_16(std::uint32_t destination, const void* source, int bytes) {
  emulator::copy_async(destination, source, bytes, 16);
}
inline void copy_async_4(std::uint32_t destination, const void* source, int bytes) {
  emulator::copy_async(destination, source, bytes, 4);
}
// Arrives when all copies so far are done; here, when all the thread has asked for are.
inline void copy_async_arrive(std::uint32_t barrier) {
  Machine::Pending& pending = Machine::get().async_copies();
  if (pending.copies == 0) {
    Machine::get().mbarrier_arrive(barrier);
  } else {
    pending.arrivals.push_back(barrier);
  }
}
inline void copy_async_wait() { emulator::await_copies(); }

inline void mbarrier_init(std::uint32_t barrier, int arrivals) { Machine::get().mbarrier_init(barrier, arrivals); }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(std::uint32_t barrier) { Machine::get().mbarrier_arrive(barrier); }
inline void mbarrier_arrive_if(std::uint32_t barrier, std::uint32_t condition) {
  if (condition != 0) mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_at(std::uint32_t barrier, std::uint32_t rank) {
  mbarrier_arrive(emulator::in_block(barrier, rank));
}
// Happens at some later time.
inline void store_async_at(std::uint32_t address, std::uint32_t value, std::uint32_t barrier, std::uint32_t rank) {
  Machine::get().later([to = emulator::in_block(address, rank), value, there = emulator::in_block(barrier, rank)] {
    std::memcpy(Machine::get().shared_written_beside(to, 4), &value, 4);
    Machine::get().mbarrier_delivered(there, 4);
  });
}
inline void cluster_sync() { Machine::get().cluster_sync(); }
inline bool elect() {
  Machine::get().exchange(0, "elect.sync");
  return Machine::get().thread() % 32 == 0;
}
inline void mbarrier_arrive_expect(std::uint32_t barrier, int bytes) { Machine::get().mbarrier_arrive(barrier, bytes); }
inline void mbarrier_wait(std::uint32_t barrier, int parity) { Machine::get().mbarrier_wait(barrier, parity); }
inline std::uint32_t mbarrier_test(std::uint32_t barrier, int parity) {
  return Machine::get().mbarrier_done(barrier, parity) ? 1 : 0;
}

inline void named_barrier_sync(int id, int threads) { Machine::get().barrier(id, threads, true); }
inline void named_barrier_arrive(int id, int threads) { Machine::get().barrier(id, threads, false); }

inline void fence_async_proxy() { Machine::get().fence(); }
inline void fence_async_proxy_seen() { Machine::get().fence_seen(); }
// Kernels run one after the other.
inline void wait_for_kernels_before() {}
inline void start_next_kernel() {}

template <int kRegisters>
void shrink_registers() {}
template <int kRegisters>
void grow_registers() {}

}  // namespace dspattn::cuda::ptx
