// What tensor work of two warpgroups does to a third one's plain instructions, and these to it: cycles of an
// instruction and of a wgmma, alone and side by side. Prints a JSON list of rows; bench/forward/contention.py runs it.
//
// A block has three warpgroups, so each of the four schedulers has one warp that executes plain instructions (eight
// independent chains) and two that keep the tensor core busy with products from registers, m64n128: dense k16 like the
// scores', or sparse k32 like the output's.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_shapes.h"
#include "dspattn/dtype.h"

namespace {

using namespace dspattn;
using namespace dspattn::cuda;

enum class Instruction { select_bits, invert_bits, max_half, compare_half, pack_half, unpack_half, fma, add, exp2 };
constexpr const char* kNames[] = {"LOP3, 3 registers", "LOP3, 1 register",  "HMNMX2", "HSET2",   "F2FP",
                                  "HADD2.F32",         "FFMA, 3 registers", "FADD",   "MUFU.EX2"};

constexpr int kChains = 8;
constexpr int kUnrolled = 4;
constexpr int kSteps = 8;  // wgmma between waits, as in a score product at d = 128
constexpr int kSharedBytes = 64 * 1024;

template <Instruction kInstruction>
__device__ __forceinline__ void execute(std::uint32_t& a, std::uint32_t b, std::uint32_t c) {
  using enum Instruction;
  if constexpr (kInstruction == select_bits) {
    asm volatile("lop3.b32 %0, %0, %1, %2, 0xCA;" : "+r"(a) : "r"(b), "r"(c));
  } else if constexpr (kInstruction == invert_bits) {
    asm volatile("lop3.b32 %0, %0, %0, %0, 0x15;" : "+r"(a));
  } else if constexpr (kInstruction == max_half) {
    asm volatile("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  } else if constexpr (kInstruction == compare_half) {
    asm volatile("set.gt.u32.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  } else if constexpr (kInstruction == pack_half) {
    asm volatile("cvt.rn.f16x2.f32 %0, %0, %1;" : "+r"(a) : "r"(b));
  } else if constexpr (kInstruction == unpack_half) {
    asm volatile("{.reg .f16 l, h; mov.b32 {l, h}, %0; cvt.f32.f16 %0, h;}" : "+r"(a));
  } else if constexpr (kInstruction == fma) {
    asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(c));
  } else if constexpr (kInstruction == add) {
    asm volatile("add.f32 %0, %0, %1;" : "+r"(a) : "r"(b));
  } else {
    asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+r"(a));
  }
}

template <Instruction kInstruction>
__device__ __forceinline__ std::uint32_t run_plain(int rounds) {
  std::uint32_t r[2 * kChains];
#pragma unroll
  for (int i = 0; i < 2 * kChains; ++i) r[i] = 0x3C003C00u + threadIdx.x * 7 + static_cast<unsigned>(i);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kUnrolled * kChains; ++i) {
      execute<kInstruction>(r[i % kChains], r[kChains + (i + 3) % kChains], r[kChains + i % kChains]);
    }
  }
  std::uint32_t all = 0;
#pragma unroll
  for (const std::uint32_t x : r) all ^= x;
  return all;
}

template <bool kSparse>
__device__ __forceinline__ float run_products(int rounds, std::uint32_t shared) {
  float sums[64] = {};
  const std::uint32_t a[4] = {threadIdx.x, 1, 2, 3};
  const std::uint32_t low = ptx::descriptor_low(shared, kSparse ? 16384 : 16);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kSparse) {
        ptx::wgmma_sparse<DType::bf16, 0>(sums, a[0], a[1], a[2], a[3], ptx::descriptor(low + (step % 4) * 256),
                                          0x44444444u, 1);
      } else {
        ptx::wgmma_dense<DType::bf16>(sums, a, ptx::descriptor(low + (step % 4) * 2));
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
  float all = 0;
#pragma unroll
  for (const float x : sums) all += x;
  return all;
}

// cycles[0]: the plain instructions', cycles[1]: the products'.
template <Instruction kInstruction, bool kSparse>
__global__ void __launch_bounds__(384, 1)
    contend(int plain_rounds, int product_rounds, long long* cycles, float* sink) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  for (int i = static_cast<int>(threadIdx.x); i < kSharedBytes / 4; i += 384) {
    reinterpret_cast<std::uint32_t*>(shared)[i] = 0;
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const long long begin = clock64();
  const float result = warpgroup == 0 ? static_cast<float>(run_plain<kInstruction>(plain_rounds))
                                      : run_products<kSparse>(product_rounds, ptx::shared_address(shared));
  const long long end = clock64();
  if (blockIdx.x == 0 && threadIdx.x % 128 == 0 && warpgroup < 2) cycles[warpgroup] = end - begin;
  if (result == 12345.0f) *sink = result;  // else it could be left out
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "contention: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <Instruction kInstruction, bool kSparse>
void measure(int blocks, const char* separator) {
  long long* cycles;
  float* sink;
  check(cudaMallocManaged(&cycles, 2 * sizeof(long long)));
  check(cudaMalloc(&sink, sizeof(float)));
  const auto kernel = &contend<kInstruction, kSparse>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const auto run = [&](int plain_rounds, int product_rounds) {
    kernel<<<blocks, 384, kSharedBytes>>>(plain_rounds, product_rounds, cycles, sink);
    check(cudaGetLastError());
    check(cudaDeviceSynchronize());
  };
  constexpr double kPerPlain = kUnrolled * kChains;
  constexpr double kPerProduct = 2 * kSteps;  // two warpgroups
  run(2000, 0);
  const double plain = cycles[0] / (2000 * kPerPlain);
  run(0, 400);
  const double product = cycles[1] / (400 * kPerProduct);
  // One side runs two and a half times as long as the other needs alone: it is never idle while the other is timed.
  run(2000, static_cast<int>(2.5 * 2000 * kPerPlain * plain / (kPerProduct * product)) + 1);
  const double plain_beside = cycles[0] / (2000 * kPerPlain);
  run(static_cast<int>(2.5 * 400 * kPerProduct * product / (kPerPlain * plain)) + 1, 400);
  const double product_beside = cycles[1] / (400 * kPerProduct);
  std::printf(
      "%s{\"instruction\": \"%s\", \"product\": \"%s\", \"cycles\": %.2f, \"cycles_beside\": %.2f, "
      "\"product_cycles\": %.1f, \"product_cycles_beside\": %.1f}",
      separator, kNames[static_cast<int>(kInstruction)], kSparse ? "sparse" : "dense", plain, plain_beside, product,
      product_beside);
  check(cudaFree(cycles));
  check(cudaFree(sink));
}

template <bool kSparse>
void measure_all(int blocks, const char* separator) {
  using enum Instruction;
  measure<select_bits, kSparse>(blocks, separator);
  measure<invert_bits, kSparse>(blocks, ",\n");
  measure<max_half, kSparse>(blocks, ",\n");
  measure<compare_half, kSparse>(blocks, ",\n");
  measure<pack_half, kSparse>(blocks, ",\n");
  measure<unpack_half, kSparse>(blocks, ",\n");
  measure<fma, kSparse>(blocks, ",\n");
  measure<add, kSparse>(blocks, ",\n");
  measure<exp2, kSparse>(blocks, ",\n");
}

}  // namespace

int main() {
  int blocks = 0;
  check(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0));
  measure_all<false>(blocks, "[\n");
  measure_all<true>(blocks, ",\n");
  std::printf("\n]\n");
}
