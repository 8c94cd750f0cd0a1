// What only tiles of mask tensors need: copies of 8 bytes, transposed matrices, bits spread to halves of a word.
#pragma once

#include <cstdint>

namespace dspattn::cuda::ptx {

// 8 bytes from global to shared memory without passing through registers: `bytes` of the source, then zeros.
__device__ __forceinline__ void copy_async_8(std::uint32_t destination, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// The same of all 8 bytes, in fewer instructions.
__device__ __forceinline__ void copy_async_8(std::uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(destination), "l"(source) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, transposed. Lane l's address is that of row l % 8 of matrix l / 8; of column
// l / 4 of matrix i the lane gets rows 2 (l % 4) and the next, as words[i].
__device__ __forceinline__ void load_transposed_matrices(std::uint32_t address, std::uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// 0xFF in byte i of the result where byte (nibble i of kBytes) of x has its highest bit, else 0.
template <std::uint32_t kBytes>
__device__ __forceinline__ std::uint32_t spread_signs(std::uint32_t x) {
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(result) : "r"(x), "n"(kBytes | 0x8888u));
  return result;
}

}  // namespace dspattn::cuda::ptx
