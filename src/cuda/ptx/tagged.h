// CTAs of a grid tell each other through global memory that nobody has cleared: what they write bears the launch's tag,
// which no memory holds but by an accident. Before Hopper nobody does.
#pragma once

#include <cstdint>

namespace dspattn::cuda::ptx {

// Rounds of asking, of about half a microsecond, after which a CTA no longer relies on another one's being at work.
inline constexpr int kPatience = 400;

// Two numbers and a tag, 16 bytes in one access: whoever sees the tag sees the numbers.
__device__ __forceinline__ void store_tagged([[maybe_unused]] void* to, [[maybe_unused]] float2 x,
                                             [[maybe_unused]] std::uint64_t tag) {
#if __CUDA_ARCH__ >= 700
  asm volatile(
      "{.reg .b64 low; .reg .b128 all; mov.b64 low, {%1, %2}; mov.b128 all, {low, %3};\n"
      "st.relaxed.gpu.global.b128 [%0], all;}" ::"l"(to),
      "f"(x.x), "f"(x.y), "l"(tag)
      : "memory");
#endif
}
__device__ __forceinline__ std::uint64_t load_tagged([[maybe_unused]] const void* from, [[maybe_unused]] float2& x) {
  std::uint64_t tag = 0;
#if __CUDA_ARCH__ >= 700
  asm volatile(
      "{.reg .b64 low; .reg .b128 all; ld.relaxed.gpu.global.b128 all, [%3];\n"
      "mov.b128 {low, %2}, all; mov.b64 {%0, %1}, low;}"
      : "=f"(x.x), "=f"(x.y), "=l"(tag)
      : "l"(from)
      : "memory");
#endif
  return tag;
}

// Counters of arrivals: a tag, whose last kCountBits bits are 0, and a count in these. Between launches they are 0, or
// anything.
inline constexpr int kCountBits = 16;

// By one thread, before it arrives: the counter bears the tag then, whoever was first.
__device__ __forceinline__ void open_counter([[maybe_unused]] std::uint64_t* counter,
                                             [[maybe_unused]] std::uint64_t tag) {
#if __CUDA_ARCH__ >= 700
  std::uint64_t expected = 0;
  for (;;) {
    std::uint64_t seen;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(seen)
                 : "l"(counter), "l"(expected), "l"(tag)
                 : "memory");
    if (seen == expected || seen >> kCountBits == tag >> kCountBits) return;
    expected = seen;
  }
#endif
}
// By one thread, after a barrier of its CTA: which arrival this is, from 0 on. The CTA has written what it wrote for
// whoever arrives later.
__device__ __forceinline__ unsigned arrive_at([[maybe_unused]] std::uint64_t* counter) {
  std::uint64_t before = 0;
#if __CUDA_ARCH__ >= 700
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
#endif
  return static_cast<unsigned>(before & ((1u << kCountBits) - 1));
}

}  // namespace dspattn::cuda::ptx
