// Instructions of sm_80 and later that the kernels for every card use, one per function: asynchronous copies to shared
// memory, ldmatrix, dense and sparse mma, packed conversions. Operand layouts are those of the PTX ISA, sections
// "Matrix fragments for mma" and "for sparse mma"; g = lane / 4, t = lane % 4 below.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/address.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/single.h"

namespace dspattn::cuda::ptx {

// 16 bytes global -> shared past L1; the bytes from `valid` on are filled with zeros, and nothing is read when it is 0.
__device__ __forceinline__ void cp_async_16(std::uint32_t shared, const void* global, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}

// 16 bytes that all exist.
__device__ __forceinline__ void cp_async_16(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; matrix i's rows are at the addresses of lanes 8i ... 8i+7. Lane (g, t) receives
// elements 2t, 2t+1 of row g: 4 bytes, so that the same instruction serves 8x4 matrices of 32-bit elements.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// The same transposed: lane (g, t) receives elements g of rows 2t, 2t+1.
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// acc[16x8] += a[16 x 32 bytes] * b[32 bytes x 8]: m16n8k16 for 16-bit elements, m16n8k8 for tf32.
template <typename Element>
__device__ __forceinline__ void mma_32_bytes(float (&acc)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1);

template <>
__device__ __forceinline__ void mma_32_bytes<__nv_bfloat16>(float (&acc)[4], const std::uint32_t (&a)[4],
                                                            std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_32_bytes<__half>(float (&acc)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                     std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_32_bytes<float>(float (&acc)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                    std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// acc[16x8] += a * b[64 bytes of keys x 8], a given by its nonzeros (32 bytes a row) and the metadata of the lanes that
// kSelector names (0: t = 0, 1; 1: t = 2, 3): m16n8k32 for 16-bit elements, m16n8k16 for tf32. The two indices of a
// code ascend, which is what ::ordered_metadata promises.
template <typename Element, int kSelector>
__device__ __forceinline__ void mma_sparse_64_bytes(float (&acc)[4], const std::uint32_t (&a)[4],
                                                    const std::uint32_t (&b)[4], std::uint32_t metadata) {
  static_assert(kSelector == 0 || kSelector == 1);
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(kSelector));
  } else if constexpr (std::is_same_v<Element, __half>) {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(kSelector));
  } else {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(kSelector));
  }
}

// acc[16x8] = a * b: mma_32_bytes without a sum to start from.
template <typename Element>
__device__ __forceinline__ void mma_32_bytes_from_zero(float (&acc)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                       std::uint32_t b1) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(acc[0]), "=f"(acc[1]), "=f"(acc[2]), "=f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  } else if constexpr (std::is_same_v<Element, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(acc[0]), "=f"(acc[1]), "=f"(acc[2]), "=f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(acc[0]), "=f"(acc[1]), "=f"(acc[2]), "=f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  }
}

// fp32 -> tf32, nearest, ties away from zero; NaN stays NaN.
__device__ __forceinline__ std::uint32_t round_tf32(std::uint32_t bits) {
  std::uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}

// Two fp32 -> fp16, nearest even, clamped to +-65504; NaN stays NaN. `low` lands in bits 15:0.
__device__ __forceinline__ std::uint32_t pack_half2_clamped(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ std::uint32_t pack_half2(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The larger of two fp16 in each half; NaN when either is NaN.
__device__ __forceinline__ std::uint32_t max_half2_nan(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

__device__ __forceinline__ std::uint32_t min_half2_nan(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// 0xFFFF in each half where the comparison holds; false when either is NaN.
__device__ __forceinline__ std::uint32_t greater_half2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t mask;
  asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
  return mask;
}

__device__ __forceinline__ std::uint32_t greater_equal_half2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t mask;
  asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
  return mask;
}

// 2^x, flushing denormal results to zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// No instruction: keeps the compiler from moving memory accesses across it, and from knowing `value`, so that nothing
// computed from it is shared between the places that call this.
__device__ __forceinline__ int forget(int value) {
  asm volatile("" : "+r"(value)::"memory");
  return value;
}

// 16 bytes to global memory in one access. Written as C++ the compiler splits the store into four where the registers
// are scattered, and memory then sees a quarter of a sector at a time.
__device__ __forceinline__ void store_16(void* pointer, const std::uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

// The same for 8 bytes.
__device__ __forceinline__ void store_8(void* pointer, std::uint32_t first, std::uint32_t second) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(pointer), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ void store_4(void* pointer, std::uint32_t word) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(pointer), "r"(word) : "memory");
}

// Memory that is read or written once: kept out of the way of what is reused.
__device__ __forceinline__ uint4 load_streaming(const uint4* pointer) { return __ldcs(pointer); }
__device__ __forceinline__ void store_streaming(uint4* pointer, uint4 value) { __stcs(pointer, value); }

}  // namespace dspattn::cuda::ptx
