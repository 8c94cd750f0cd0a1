// What nvcc gives device code without an include: qualifiers, indices, functions of a warp. Included by force before
// every emulated source.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator/machine.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
// A host thread runs one block at a time. Dynamic shared memory has a macro of its own (cuda/ptx/address.h).
#define __shared__ static thread_local

inline constinit thread_local dspattn::emulator::Index threadIdx, blockIdx, blockDim, gridDim;

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::isinf;
using std::max;
using std::min;

namespace dspattn::emulator {

template <typename T>
std::uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T>
T from_bits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Only exchanges of whole warps are emulated.
template <typename T, typename Source>
T shuffle(unsigned mask, T value, const char* kind, Source source) {
  if (mask != ~0u) Machine::fail("a shuffle of part of a warp");
  const auto& all = Machine::get().exchange(to_bits(value), kind);
  const int lane = Machine::get().thread() % kWarp;
  const int from = source(lane);
  return from_bits<T>(all[static_cast<std::size_t>(from >= 0 && from < kWarp ? from : lane)]);
}

}  // namespace dspattn::emulator

inline void __syncwarp(unsigned mask = ~0u) {
  if (mask != ~0u) dspattn::emulator::Machine::fail("__syncwarp of part of a warp");
  dspattn::emulator::Machine::get().exchange(0, "__syncwarp");
}
inline void __syncthreads() {
  const auto threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  dspattn::emulator::Machine::get().barrier(0, threads, true);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int from) {
  return dspattn::emulator::shuffle(mask, value, "__shfl_sync", [from](int) { return from % 32; });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with) {
  return dspattn::emulator::shuffle(mask, value, "__shfl_xor_sync", [with](int lane) { return lane ^ with; });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int by) {
  return dspattn::emulator::shuffle(mask, value, "__shfl_up_sync", [by](int lane) { return lane - by; });
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int by) {
  return dspattn::emulator::shuffle(mask, value, "__shfl_down_sync", [by](int lane) { return lane + by; });
}
inline unsigned __ballot_sync(unsigned, bool condition) {
  const auto& all = dspattn::emulator::Machine::get().exchange(condition ? 1 : 0, "__ballot_sync");
  unsigned bits = 0;
  for (std::size_t lane = 0; lane < all.size(); ++lane) bits |= all[lane] != 0 ? 1u << lane : 0u;
  return bits;
}
inline int __all_sync(unsigned, bool condition) {
  const auto& all = dspattn::emulator::Machine::get().exchange(condition ? 1 : 0, "__all_sync");
  return std::all_of(all.begin(), all.end(), [](std::uint64_t x) { return x != 0; });
}

inline int atomicAdd(int* address, int value) {
  const int before = *address;
  *address += value;
  return before;
}
inline std::uint32_t __funnelshift_r(std::uint32_t low, std::uint32_t high, std::uint32_t bits) {
  return static_cast<std::uint32_t>(((static_cast<std::uint64_t>(high) << 32) | low) >> (bits & 31));
}
inline std::uint32_t __byte_perm(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    if ((selector >> (4 * i) & 8) != 0) dspattn::emulator::Machine::fail("__byte_perm that repeats a sign");
    result |= static_cast<std::uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  }
  return result;
}
inline std::uint32_t __float_as_uint(float x) { return std::bit_cast<std::uint32_t>(x); }
inline float __uint_as_float(std::uint32_t x) { return std::bit_cast<float>(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdividef(float x, float y) { return x / y; }
