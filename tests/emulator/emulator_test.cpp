// The emulated multiprocessor itself: products and copies do what the hardware does, and kernels that break a rule are
// told so. Each kernel here is a few lines with one fault, or with none.
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
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_shapes.h"
#include "cuda/tile/key_map.h"
#include "emulator/device.h"

namespace dspattn::cuda {
namespace {

constexpr std::uint32_t kBarrier = emulator::kSharedBase + 1024 - emulator::kSharedBase % 1024;  // 1 KiB for barriers
constexpr std::uint32_t kData = kBarrier + 1024;

struct Outcome {
  bool ended;
  std::string message;
};

// Runs `body` in every thread of one block.
Outcome run(int threads, const std::function<void()>& body) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = 64 * 1024;
  const cudaError_t error = emulator::launch(config, body);
  return {error == cudaSuccess, error == cudaSuccess ? "" : cudaGetErrorString(error)};
}

// Runs `body` in every thread of a cluster of two blocks.
Outcome run_pair(int threads, const std::function<void()>& body) {
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

void expect_told(const Outcome& outcome, const std::string& what) {
  EXPECT_FALSE(outcome.ended);
  EXPECT_NE(outcome.message.find(what), std::string::npos) << outcome.message;
}

// How often something that depends on the order of events is seen in 60 launches.
int times_of_60(const std::function<bool()>& launch) {
  int seen = 0;
  for (int i = 0; i < 60; ++i) seen += launch() ? 1 : 0;
  return seen;
}

void init_barrier(int arrivals) {
  if (threadIdx.x == 0) ptx::mbarrier_init(kBarrier, arrivals);
  __syncthreads();
}

TEST(EmulatedRules, AWaitForNobodyIsAHang) {
  const Outcome outcome = run(64, [] {
    init_barrier(1);
    if (threadIdx.x >= 32) ptx::mbarrier_wait(kBarrier, 0);
  });
  expect_told(outcome, "hangs");
  expect_told(outcome, "32 threads from 32 to 63");
  expect_told(outcome, std::to_string(kBarrier));
}

TEST(EmulatedRules, APhaseAheadIsAHang) {
  // Waits for the second phase, of which there is none.
  expect_told(run(32,
                  [] {
                    init_barrier(32);
                    ptx::mbarrier_arrive(kBarrier);
                    ptx::mbarrier_wait(kBarrier, 0);
                    ptx::mbarrier_wait(kBarrier, 1);
                  }),
              "hangs");
}

TEST(EmulatedRules, AParityTellsOnlyNeighbouringPhasesApart) {
  // A lagging thread that waits for phase 0 when two phases are gone: the parity is that of a phase to come.
  EXPECT_GT(times_of_60([] {
              return !run(64, [] {
                        init_barrier(1);
                        if (threadIdx.x == 0) {
                          ptx::mbarrier_arrive(kBarrier);
                          ptx::mbarrier_arrive(kBarrier);
                        }
                        if (threadIdx.x == 32) ptx::mbarrier_wait(kBarrier, 0);
                      }).ended;
            }),
            0);
}

TEST(EmulatedRules, TooManyArrivals) {
  expect_told(run(32,
                  [] {
                    init_barrier(2);
                    if (threadIdx.x == 0) {
                      ptx::mbarrier_arrive_expect(kBarrier, 16);
                      for (int i = 0; i < 2; ++i) ptx::mbarrier_arrive(kBarrier);
                    }
                  }),
              "more arrivals");
}

TEST(EmulatedRules, BarriersThatNobodyInitialised) {
  expect_told(run(32, [] { ptx::mbarrier_arrive(kBarrier); }), "no mbarrier");
}

TEST(EmulatedRules, LanesThatMeetAtDifferentPlaces) {
  expect_told(run(32,
                  [] {
                    if (threadIdx.x < 16) {
                      __syncwarp();
                    } else {
                      __shfl_sync(~0u, 1, 0);
                    }
                  }),
              "meet at");
}

TEST(EmulatedRules, LanesThatHaveEndedAreNotWaitedFor) {
  EXPECT_TRUE(run(32, [] {
                if (threadIdx.x < 8) __syncwarp();
              }).ended);
}

TEST(EmulatedRules, ANamedBarrierThatMissesAWarpIsAHang) {
  expect_told(run(96,
                  [] {
                    if (threadIdx.x < 64) ptx::named_barrier_sync(3, 96);
                  }),
              "64 threads from 0 to 63");
}

TEST(EmulatedRules, SharedMemoryHasAnEndAndAlignment) {
  expect_told(run(32, [] { ptx::load_shared(emulator::kSharedBase + 64 * 1024); }), "outside");
  expect_told(run(32, [] { ptx::store_shared(kData + 2, 1); }), "aligned");
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

void load_matrix(const Matrix64& matrix, std::uint32_t to) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(kBarrier, 64 * 128);
    ptx::tma_load_4d(to, &matrix.map, kBarrier, 0, 0, 0, 0);
  }
}

TEST(EmulatedCopies, LandSwizzledAndFilledUpWithZeros) {
  const Matrix64 matrix(50);
  std::vector<std::uint32_t> words(64 * 32);
  ASSERT_TRUE(run(32, [&] {
                init_barrier(1);
                load_matrix(matrix, kData);
                ptx::mbarrier_wait(kBarrier, 0);
                for (std::size_t i = threadIdx.x; i < words.size(); i += 32) {
                  const int row = static_cast<int>(i) / 32;
                  const int offset =
                      tile::swizzled_offset(row, static_cast<int>(i) % 32 / 4) + static_cast<int>(i) % 4 * 4;
                  words[i] = ptx::load_shared(kData + static_cast<std::uint32_t>(offset));
                }
              }).ended);
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::uint32_t expected =
        i / 32 < 50 ? matrix.values[2 * i] | static_cast<std::uint32_t>(matrix.values[2 * i + 1]) << 16 : 0;
    ASSERT_EQ(words[i], expected) << i;
  }
}

// Addresses of this block of a cluster.
std::uint32_t here(std::uint32_t address) { return address | blockIdx.x << emulator::kWindowBits; }

void init_barrier_of_pair(int arrivals) {
  if (threadIdx.x == 0) ptx::mbarrier_init(here(kBarrier), arrivals);
  ptx::cluster_sync();
}

// Each block brings a matrix for both, which may arrive before the other one has announced it.
TEST(EmulatedClusters, AMulticastLandsInBothBlocks) {
  const std::array<Matrix64, 2> matrices{Matrix64(64, 1, 5), Matrix64(64, 2, 5)};
  std::array<std::array<std::uint32_t, 2>, 2> first_words{};
  const auto body = [&] {
    init_barrier_of_pair(1);
    if (threadIdx.x == 0) {
      const std::uint32_t to = kData + 8192 * blockIdx.x;
      ptx::mbarrier_arrive_expect(here(kBarrier), 2 * 8192);
      ptx::tma_load_5d_multicast(here(to), &matrices[blockIdx.x].map, here(kBarrier), 0, 0, 0, 0, 0, 3);
    }
    ptx::mbarrier_wait(here(kBarrier), 0);
    if (threadIdx.x < 2) first_words[blockIdx.x][threadIdx.x] = ptx::load_shared(here(kData + 8192 * threadIdx.x));
    ptx::cluster_sync();
  };
  for (int i = 0; i < 20; ++i) {
    first_words = {};
    const Outcome outcome = run_pair(128, body);
    ASSERT_TRUE(outcome.ended) << outcome.message;
    for (std::size_t block = 0; block < 2; ++block) {
      for (std::size_t which = 0; which < 2; ++which) {
        const auto& values = matrices[which].values;
        EXPECT_EQ(first_words[block][which], values[0] | static_cast<std::uint32_t>(values[1]) << 16);
      }
    }
  }
}

// A word for the other block, before or after that has said that it expects one.
TEST(EmulatedClusters, AWordArrivesInTheOtherBlock) {
  std::uint32_t word = 0;
  const auto body = [&] {
    init_barrier_of_pair(1);
    if (blockIdx.x == 0 && threadIdx.x == 0) ptx::store_async_at(here(kData), 1234, here(kBarrier), 1);
    if (blockIdx.x == 1) {
      if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(here(kBarrier), 4);
      ptx::mbarrier_wait(here(kBarrier), 0);
      if (threadIdx.x == 0) word = ptx::load_shared(here(kData));
    }
    ptx::cluster_sync();
  };
  for (int i = 0; i < 20; ++i) {
    word = 0;
    const Outcome outcome = run_pair(128, body);
    ASSERT_TRUE(outcome.ended) << outcome.message;
    EXPECT_EQ(word, 1234u);
  }
}

TEST(EmulatedClusters, ABlockThatHasEndedIsNotArrivedAt) {
  const auto body = [](bool waits) {
    init_barrier_of_pair(1);
    if (blockIdx.x == 0) {
      for (int i = 0; i < 20; ++i) __syncthreads();  // takes longer than the other one lives
      if (threadIdx.x == 0) ptx::mbarrier_arrive_at(here(kBarrier), 1);
    }
    if (blockIdx.x == 1 && waits) ptx::mbarrier_wait(here(kBarrier), 0);
  };
  EXPECT_TRUE(run_pair(128, [&] { body(true); }).ended);
  EXPECT_GT(times_of_60([&] {
              return run_pair(128, [&] { body(false); }).message.find("after its block has ended") != std::string::npos;
            }),
            0);
}

TEST(EmulatedClusters, AClusterIsNotASyncOfPartOfIt) {
  expect_told(run_pair(128,
                       [] {
                         if (blockIdx.x == 0) ptx::cluster_sync();
                         if (blockIdx.x == 1) ptx::named_barrier_sync(1, 256);  // 128 of them in this block
                       }),
              "hangs");
}

TEST(EmulatedRules, OneLaneIsElected) {
  int elected = 0;
  ASSERT_TRUE(run(64, [&] { elected += ptx::elect() ? 1 : 0; }).ended);
  EXPECT_EQ(elected, 2);
  expect_told(run(32,
                  [] {
                    if (threadIdx.x < 16) {
                      ptx::elect();
                    } else {
                      __syncwarp();
                    }
                  }),
              "meet at");
}

TEST(EmulatedCopies, WhatIsNotWaitedForMayBeMissing) {
  const Matrix64 matrix;
  const int stale = times_of_60([&] {
    bool missing = false;
    run(32, [&] {
      init_barrier(1);
      load_matrix(matrix, kData);
      __syncwarp();
      if (threadIdx.x == 0) missing = (ptx::load_shared(kData) & 0xFFFF) != matrix.values[0];
      ptx::mbarrier_wait(kBarrier, 0);
    });
    return missing;
  });
  EXPECT_GT(stale, 0);
}

TEST(EmulatedCopies, SharedMemoryBelongsToAStoreUntilItIsRead) {
  // Overwrites what TMA may still have to read; waiting for it is the remedy.
  for (const bool waits : {false, true}) {
    const int spoilt = times_of_60([&] {
      Matrix64 matrix;
      EXPECT_TRUE(run(32, [&] {
                    for (std::uint32_t i = threadIdx.x; i < 2048; i += 32) ptx::store_shared(kData + 4 * i, 0x40004000);
                    ptx::fence_async_proxy();
                    __syncwarp();
                    if (threadIdx.x == 0) {
                      ptx::tma_store_4d(&matrix.map, kData, 0, 0, 0, 0);
                      ptx::tma_store_commit();
                      if (waits) ptx::tma_store_wait_read();
                    }
                    __syncwarp();
                    for (std::uint32_t i = threadIdx.x; i < 2048; i += 32) ptx::store_shared(kData + 4 * i, 0);
                    ptx::fence_async_proxy();
                  }).ended);
      return matrix.values[0] != 0x4000;
    });
    EXPECT_EQ(spoilt > 0, !waits);
  }
}

// D = A B with A from registers or sparse, B in shared memory by columns or rows; all values small integers, so exact.
struct Product {
  Matrix64 b;
  std::array<std::array<float, 32>, 128> d{};

  float at(int row, int column) const {
    const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
    return d[static_cast<std::size_t>(thread)]
            [static_cast<std::size_t>(column / 8 * 4 + (row % 16 >= 8 ? 2 : 0) + column % 2)];
  }
};

std::uint16_t small(int x) { return core::encode_f16(static_cast<double>(x)); }
std::uint32_t pair(int low, int high) { return small(low) | static_cast<std::uint32_t>(small(high)) << 16; }

// The first of a thread's two rows.
int first_row() {
  const int thread = static_cast<int>(threadIdx.x);
  return thread / 32 * 16 + thread % 32 / 4;
}

// A thread's share of a 64 x 16 operand, value(row, k).
template <typename Value>
void fill_operand(std::uint32_t (&words)[4], Value value) {
  for (int i = 0; i < 4; ++i) {
    const int row = first_row() + 8 * (i & 1), k = 8 * (i >> 1) + 2 * (static_cast<int>(threadIdx.x) % 4);
    words[i] = pair(value(row, k), value(row, k + 1));
  }
}

TEST(EmulatedProducts, DenseFromRegisters) {
  const auto a = [](int row, int k) { return (row * 5 + k * 3) % 7 - 3; };
  Product product;
  ASSERT_TRUE(run(128, [&] {
                init_barrier(1);
                load_matrix(product.b, kData);
                ptx::mbarrier_wait(kBarrier, 0);
                float d[32];
                std::uint32_t words[4];
                fill_operand(words, a);
                const std::uint32_t low = ptx::descriptor_low(kData, 16);
                ptx::wgmma_fence();
                ptx::wgmma_dense_first<DType::f16>(d, words, ptx::descriptor(low));
                ptx::wgmma_dense<DType::f16>(d, words, ptx::descriptor(low + 2));  // the next 16 of the depth
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                std::copy(std::begin(d), std::end(d), product.d[threadIdx.x].begin());
              }).ended);
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < 64; ++column) {
      float expected = 0;
      for (int k = 0; k < 32; ++k) expected += static_cast<float>(a(row, k % 16)) * product.b.at(column, k);
      ASSERT_EQ(product.at(row, column), expected) << row << " " << column;
    }
  }
}

// Of four keys the kept two are 1 and 3 in even rows, 0 and 2 in odd ones.
std::uint32_t metadata_of(int row) { return row % 2 == 0 ? 0xDDDDu : 0x8888u; }

TEST(EmulatedProducts, SparseByRows) {
  const auto value = [](int row, int i) { return (row * 3 + i * 5) % 9 - 4; };
  for (const int pair_of_lanes : {0, 1}) {
    Product product;
    ASSERT_TRUE(run(128, [&] {
                  init_barrier(1);
                  load_matrix(product.b, kData);
                  ptx::mbarrier_wait(kBarrier, 0);
                  const int row = first_row();
                  const int t = static_cast<int>(threadIdx.x) % 4;
                  float d[32];
                  std::uint32_t a[4];
                  fill_operand(a, value);
                  // Only the chosen lanes of a quad are read.
                  const std::uint32_t metadata =
                      t / 2 == pair_of_lanes ? metadata_of(row) | metadata_of(row + 8) << 16 : 0;
                  const std::uint64_t b = ptx::descriptor(ptx::descriptor_low(kData, 64 * 128));
                  ptx::wgmma_fence();
                  if (pair_of_lanes == 0) {
                    ptx::wgmma_sparse<DType::f16, 0>(d, a[0], a[1], a[2], a[3], b, metadata, 0);
                  } else {
                    ptx::wgmma_sparse<DType::f16, 1>(d, a[0], a[1], a[2], a[3], b, metadata, 0);
                  }
                  ptx::wgmma_commit();
                  ptx::wgmma_wait<0>();
                  std::copy(std::begin(d), std::end(d), product.d[threadIdx.x].begin());
                }).ended);
    for (int row = 0; row < 64; ++row) {
      for (int column = 0; column < 64; ++column) {
        float expected = 0;
        for (int i = 0; i < 16; ++i) {
          const int k = 4 * (i / 2) + (row % 2 == 0 ? 1 : 0) + 2 * (i % 2);
          expected += static_cast<float>(value(row, i)) * product.b.at(k, column);
        }
        ASSERT_EQ(product.at(row, column), expected) << row << " " << column;
      }
    }
  }
}

TEST(EmulatedProducts, SeeStoresBehindAFenceOnly) {
  enum class Fence { of_most, of_all, of_one_who_has_seen_them };
  for (const Fence fence : {Fence::of_most, Fence::of_all, Fence::of_one_who_has_seen_them}) {
    const Outcome outcome = run(128, [fence] {
      for (std::uint32_t i = threadIdx.x; i < 2048; i += 128) ptx::store_shared(kData + 4 * i, 0);
      // One that forgets it is enough.
      if (fence == Fence::of_all || (fence == Fence::of_most && threadIdx.x != 77)) ptx::fence_async_proxy();
      __syncthreads();
      if (fence == Fence::of_one_who_has_seen_them && threadIdx.x == 5) ptx::fence_async_proxy_seen();
      __syncthreads();
      float d[32];
      const std::uint32_t a[4] = {};
      ptx::wgmma_dense_first<DType::f16>(d, a, ptx::descriptor(ptx::descriptor_low(kData, 16)));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
    });
    EXPECT_EQ(outcome.ended, fence != Fence::of_most) << outcome.message;
    if (fence == Fence::of_most) expect_told(outcome, "thread 77 stored");
  }
}

TEST(EmulatedProducts, MetadataMustAscend) {
  expect_told(run(128,
                  [] {
                    float d[32];
                    const std::uint64_t b = ptx::descriptor(ptx::descriptor_low(kData, 64 * 128));
                    ptx::wgmma_sparse<DType::f16, 0>(d, 0, 0, 0, 0, b, 0x55555555u, 0);  // twice element 1
                    ptx::wgmma_commit();
                    ptx::wgmma_wait<0>();
                  }),
              "does not ascend");
}

TEST(EmulatedProducts, AWarpThatDoesNotJoinIsAHang) {
  expect_told(run(128,
                  [] {
                    if (threadIdx.x >= 96) return;
                    float d[32];
                    ptx::wgmma_dense_first<DType::f16>(d,
                                                       std::uint64_t{ptx::descriptor(ptx::descriptor_low(kData, 16))},
                                                       ptx::descriptor(ptx::descriptor_low(kData, 16)));
                    ptx::wgmma_commit();
                    ptx::wgmma_wait<0>();
                  }),
              "hangs");
}

TEST(EmulatedProducts, ReadSharedMemoryUntilTheyAreWaitedFor) {
  // B is overwritten right after the product was issued, or after it was waited for.
  for (const bool waits : {false, true}) {
    const int spoilt = times_of_60([&] {
      float result = 0;
      EXPECT_TRUE(run(128, [&] {
                    for (std::uint32_t i = threadIdx.x; i < 2048; i += 128) {
                      ptx::store_shared(kData + 4 * i, pair(1, 1));
                    }
                    ptx::fence_async_proxy();
                    __syncthreads();
                    float d[32];
                    const std::uint32_t ones[4] = {pair(1, 1), pair(1, 1), pair(1, 1), pair(1, 1)};
                    ptx::wgmma_dense_first<DType::f16>(d, ones, ptx::descriptor(ptx::descriptor_low(kData, 16)));
                    ptx::wgmma_commit();
                    if (waits) ptx::wgmma_wait<0>();
                    __syncthreads();
                    for (std::uint32_t i = threadIdx.x; i < 2048; i += 128) ptx::store_shared(kData + 4 * i, 0);
                    ptx::fence_async_proxy();
                    __syncthreads();
                    ptx::wgmma_wait<0>();
                    if (threadIdx.x == 0) result = d[0];
                  }).ended);
      return result != 16;
    });
    EXPECT_EQ(spoilt > 0, !waits);
  }
}

}  // namespace
}  // namespace dspattn::cuda
