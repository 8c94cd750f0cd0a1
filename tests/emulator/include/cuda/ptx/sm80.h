// Instructions of sm_80 and later, emulated. What a warp does together is done when its last lane gets there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "cuda/ptx/address.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/single.h"
#include "emulator/copy_engine.h"
#include "emulator/warp_matrix.h"

namespace dspattn::cuda::ptx {

inline void cp_async_16(std::uint32_t shared, const void* global, int valid = 16) {
  emulator::copy_async(shared, global, valid, 16);
}
inline void cp_async_commit() { emulator::commit_copies(); }
template <int kPending>
void cp_async_wait() {
  emulator::await_copies(kPending);
}

inline void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t shared) { emulator::load_matrices(r, shared, false); }
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t shared) { emulator::load_matrices(r, shared, true); }

template <typename Element>
inline constexpr DType kDType = std::is_same_v<Element, float>           ? DType::f32
                                : std::is_same_v<Element, __nv_bfloat16> ? DType::bf16
                                                                         : DType::f16;

template <typename Element>
void mma_32_bytes(float (&acc)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  emulator::multiply({.type = kDType<Element>}, {.accumulators = acc, .a = a, .b = {b0, b1}});
}
template <typename Element>
void mma_32_bytes_from_zero(float (&acc)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  emulator::multiply({.type = kDType<Element>, .from_zero = true}, {.accumulators = acc, .a = a, .b = {b0, b1}});
}
template <typename Element, int kSelector>
void mma_sparse_64_bytes(float (&acc)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[4],
                         std::uint32_t metadata) {
  emulator::multiply({.type = kDType<Element>, .sparse = true, .metadata_pair = kSelector},
                     {.accumulators = acc, .a = a, .b = {b[0], b[1], b[2], b[3]}, .metadata = metadata});
}

inline std::uint32_t round_tf32(std::uint32_t bits) { return nearest_tf32(std::bit_cast<float>(bits)) & 0xFFFFE000u; }

inline std::uint32_t pack_half2_clamped(float low, float high) { return pack_f16x2_clamped(low, high); }
inline std::uint32_t pack_half2(float low, float high) { return pack_f16x2(low, high); }
inline std::uint32_t max_half2_nan(std::uint32_t a, std::uint32_t b) { return max_f16x2(a, b); }
inline std::uint32_t min_half2_nan(std::uint32_t a, std::uint32_t b) { return min_f16x2(a, b); }
inline std::uint32_t greater_half2(std::uint32_t a, std::uint32_t b) { return greater_f16x2(a, b); }
inline std::uint32_t greater_equal_half2(std::uint32_t a, std::uint32_t b) { return greater_equal_f16x2(a, b); }
inline float exp2_approx(float x) { return exp2_fast(x); }

inline int forget(int value) { return value; }

template <std::size_t kBytes>
void store_aligned(void* pointer, const void* bytes) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % kBytes != 0) emulator::Machine::fail("a store that is not aligned");
  std::memcpy(pointer, bytes, kBytes);
}
inline void store_16(void* pointer, const std::uint32_t (&words)[4]) { store_aligned<16>(pointer, words); }
inline void store_8(void* pointer, std::uint32_t first, std::uint32_t second) {
  const std::uint32_t words[2] = {first, second};
  store_aligned<8>(pointer, words);
}
inline void store_4(void* pointer, std::uint32_t word) { store_aligned<4>(pointer, &word); }

inline uint4 load_streaming(const uint4* pointer) { return *pointer; }
inline void store_streaming(uint4* pointer, uint4 value) { *pointer = value; }

}  // namespace dspattn::cuda::ptx
