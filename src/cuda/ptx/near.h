// Memory brought to the L2 cache before anybody asks for it.
#pragma once

namespace dspattn::cuda::ptx {

// The line of 128 bytes that `address` lies in. Reads nothing that a program could see: the L2 cache is where all
// multiprocessors' writes meet, so that what is written later is not missed.
__device__ __forceinline__ void bring_near(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// A number that another kernel may be writing; what later loads see is not affected.
__device__ __forceinline__ int peek(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}

}  // namespace dspattn::cuda::ptx
