// Memory access by address, mbarrier objects, named barriers, proxy fences, register reallocation.
#pragma once

#include <cstdint>
#if defined(DSPATTN_WATCHDOG)
#include <cstdio>
#endif

#include "cuda/ptx/address.h"

namespace dspattn::cuda::ptx {

__device__ __forceinline__ std::uint32_t load_shared(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// kBytes bytes in one access, filled up with zeros to whole words.
template <int kBytes>
__device__ __forceinline__ void load_shared_bytes(std::uint32_t address, std::uint32_t (&words)[(kBytes + 3) / 4]) {
  if constexpr (kBytes == 1) {
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
  } else if constexpr (kBytes == 2) {
    asm volatile("{.reg .u16 x; ld.shared.u16 x, [%1]; cvt.u32.u16 %0, x;}" : "=r"(words[0]) : "r"(address) : "memory");
  } else if constexpr (kBytes == 4) {
    words[0] = load_shared(address);
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
  } else {
    static_assert(kBytes == 16);
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  }
}

__device__ __forceinline__ void store_shared(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// 16 bytes in one access.
__device__ __forceinline__ void store_shared_16(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                                                std::uint32_t c, std::uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements in the layout of an accumulator; lane l gives the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                               std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Four matrices of 8 x 8 16-bit elements. Lane l's address is that of row l % 8 of matrix l / 8; of row l / 4 of matrix
// i the lane gets elements 2 (l % 4) and the next, as words[i].
__device__ __forceinline__ void load_matrices(std::uint32_t address, std::uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ float4 load_shared_16(std::uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// 8 bytes to global memory in one access.
__device__ __forceinline__ void store_global_8(void* address, float a, float b) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(a), "f"(b) : "memory");
}

// 16 bytes to global memory in one access; the compiler splits vector stores whose registers it has scattered.
__device__ __forceinline__ void store_global_16(void* address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                                std::uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// 16 bytes from global to shared memory without passing through registers; zeros when `bytes` is 0.
__device__ __forceinline__ void copy_async_16(std::uint32_t destination, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}
// The same for 4 bytes.
__device__ __forceinline__ void copy_async_4(std::uint32_t destination, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}
// This thread's arrival, when all its asynchronous copies so far are complete.
__device__ __forceinline__ void copy_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when `condition` is not zero; a predicated instruction, no branch.
//
// An arrival does not wait for loads of shared memory that are on their way, though PTX calls it a release: while the
// tensor core reads, a load may take more than 600 cycles, and TMA, which the arrival woke, was seen to
// overwrite what was still to be read. So an arrival that hands over what was loaded must need what was loaded: a 0
// made of it that the compiler does not know to be 0, added to `barrier`. tools/sass_report.py --arrivals finds those
// that do not.
__device__ __forceinline__ void mbarrier_arrive_if(std::uint32_t barrier, std::uint32_t condition) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared.b64 _, [%0];}" ::"r"(barrier),
               "r"(condition)
               : "memory");
}

// Arrives at the barrier that lies where `barrier` does, in block `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_at(std::uint32_t barrier, std::uint32_t rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}" ::
          "r"(barrier),
      "r"(rank)
      : "memory");
}
// Stores a word at `address` in block `rank` of the cluster, which arrives as 4 bytes at the barrier that lies there
// where `barrier` does. Does not wait.
__device__ __forceinline__ void store_async_at(std::uint32_t address, std::uint32_t value, std::uint32_t barrier,
                                               std::uint32_t rank) {
  asm volatile(
      "{.reg .b32 to, there; mapa.shared::cluster.u32 to, %0, %3; mapa.shared::cluster.u32 there, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [there];}" ::"r"(address),
      "r"(value), "r"(barrier), "r"(rank)
      : "memory");
}
// All threads of the cluster that have not ended; those of a warp together.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives and announces `bytes` that TMA will deliver in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Blocks until the phase of that parity is complete. With DSPATTN_WATCHDOG defined, a wait of more than about a second
// says which barrier it is for and ends the kernel: for finding out why one hangs.
#if defined(DSPATTN_WATCHDOG)
__device__ __noinline__ inline void mbarrier_wait(std::uint32_t barrier, int parity) {
  const long long begin = clock64();
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (clock64() - begin > 2'000'000'000LL) {
      printf("block %u, thread %u waits for the barrier at shared address %u, parity %d\n", blockIdx.x, threadIdx.x,
             barrier, parity);
      __nanosleep(1'000'000);  // others say the same before the first one ends the kernel
      __trap();
    }
  }
}
#else
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "wait_loop: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@p bra wait_done;\n"
      "bra wait_loop;\n"
      "wait_done: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
#endif

// Whether the phase of that parity is complete; does not wait.
__device__ __forceinline__ std::uint32_t mbarrier_test(std::uint32_t barrier, int parity) {
  std::uint32_t done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// True in one lane of a warp all of whose lanes are here.
__device__ __forceinline__ bool elect() {
  std::uint32_t chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
  return chosen != 0;
}

// Named barrier over `threads` threads: sync waits, arrive does not.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Ordinary shared-memory writes of this thread become visible to the tensor cores and TMA.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Those of other threads do, which this one has seen through a barrier: PTX asks for the fence somewhere on the way
// from the write to the other proxy's read, in whichever thread. The writers need not wait for it then.
__device__ __forceinline__ void fence_async_proxy_seen() { fence_async_proxy(); }

// Waits until the kernels this one was allowed to overtake have ended, and their writes are visible. Before Hopper none
// is: code for those architectures has nothing here.
__device__ __forceinline__ void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start, if it is launched so that it may.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace dspattn::cuda::ptx
