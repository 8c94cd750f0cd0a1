// What tests of the emulated multiprocessor share: kernels of a few lines, and a matrix for them to copy and multiply.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tma.h"
#include "emulator/device.h"

namespace dspattn::cuda {

inline constexpr std::uint32_t kBarrier =
    emulator::kSharedBase + 1024 - emulator::kSharedBase % 1024;  // 1 KiB for barriers
inline constexpr std::uint32_t kData = kBarrier + 1024;

struct Outcome {
  bool ended;
  std::string message;
};

// Runs `body` in every thread of one block.
inline Outcome run(int threads, const std::function<void()>& body) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = 64 * 1024;
  const cudaError_t error = emulator::launch(config, body);
  return {error == cudaSuccess, error == cudaSuccess ? "" : cudaGetErrorString(error)};
}

// Runs `body` in every thread of a cluster of two blocks.
inline Outcome run_pair(int threads, const std::function<void()>& body) {
  cudaLaunchAttribute pair{};
  pair.id = cudaLaunchAttributeClusterDimension;
  pair.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(2);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = 64 * 1024;
  config.attrs = &pair;
  config.numAttrs = 1;
  const cudaError_t error = emulator::launch(config, body);
  return {error == cudaSuccess, error == cudaSuccess ? "" : cudaGetErrorString(error)};
}

inline void expect_told(const Outcome& outcome, const std::string& what) {
  EXPECT_FALSE(outcome.ended);
  EXPECT_NE(outcome.message.find(what), std::string::npos) << outcome.message;
}

// How often something that depends on the order of events is seen in 60 launches.
inline int times_of_60(const std::function<bool()>& launch) {
  int seen = 0;
  for (int i = 0; i < 60; ++i) seen += launch() ? 1 : 0;
  return seen;
}

inline void init_barrier(int arrivals) {
  if (threadIdx.x == 0) ptx::mbarrier_init(kBarrier, arrivals);
  __syncthreads();
}

// 64 x 64 fp16 values, in memory and as a tensor map of boxes of 64 rows.
struct Matrix64 {
  std::vector<std::uint16_t> values = std::vector<std::uint16_t>(64 * 64);
  CUtensorMap map;

  explicit Matrix64(int rows = 64, unsigned seed = 1, cuuint32_t rank = 4) {
    std::mt19937 random(seed);
    for (std::uint16_t& value : values) value = core::encode_f16(static_cast<double>(random() % 17) - 8.0);
    void* function = nullptr;
    cudaDriverEntryPointQueryResult status{};
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status);
    const std::array<cuuint64_t, 5> extents{64, static_cast<cuuint64_t>(rows), 1, 1, 1};
    const std::array<cuuint64_t, 4> strides{128, 8192, 8192, 8192};
    const std::array<cuuint32_t, 5> box{64, 64, 1, 1, 1}, steps{1, 1, 1, 1, 1};
    const CUresult result = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, values.data(), extents.data(), strides.data(), box.data(),
        steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    EXPECT_EQ(result, CUDA_SUCCESS);
  }
  float at(int row, int column) const { return core::decode_f16(values[static_cast<std::size_t>(64 * row + column)]); }
};

inline void load_matrix(const Matrix64& matrix, std::uint32_t to) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(kBarrier, 64 * 128);
    ptx::tma_load_4d(to, &matrix.map, kBarrier, 0, 0, 0, 0);
  }
}

}  // namespace dspattn::cuda
