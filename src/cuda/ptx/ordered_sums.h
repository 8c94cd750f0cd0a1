// Sums in global memory that several CTAs add to, one after the other: the additions, and the counters that say whose
// turn it is.
#pragma once

#include <cstdint>

namespace dspattn::cuda::ptx {

// Adds to four neighbouring floats; 16-byte aligned. Does not wait.
__device__ __forceinline__ void add_global_16(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Four neighbouring floats of a sum, when a count has said that it is complete: from the L2 cache, where it is added
// up.
__device__ __forceinline__ float4 load_sum_16(const float* from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// What it stands at. Nothing else is promised to be visible: additions that wait for the answer come behind those that
// were counted, because all of them are done in the L2 cache.
__device__ __forceinline__ std::int32_t count_now(const std::int32_t* counter) {
  std::int32_t count;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// Adds to a float. Does not wait.
__device__ __forceinline__ void add_global(float* to, float a) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(a) : "memory");
}

// Until the counter has reached `least`: what its last adder had seen or done before is then visible.
__device__ __forceinline__ void await_count(const std::int32_t* counter, std::int32_t least) {
  std::int32_t count;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  } while (count < least);
}

// One more, behind all that this thread has seen or done.
__device__ __forceinline__ void count_up(std::int32_t* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// The same; how many there were before. What those before had seen or done is then visible.
__device__ __forceinline__ std::int32_t count_up_now(std::int32_t* counter) {
  std::int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

}  // namespace dspattn::cuda::ptx
