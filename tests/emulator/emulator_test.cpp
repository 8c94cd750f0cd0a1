// The emulated multiprocessor itself: copies do what the hardware does, and kernels that break a rule are
// told so. Each kernel here is a few lines with one fault, or with none.
#include <cuda_runtime.h>

#include "cuda/tile/key_map.h"
#include "emulated_kernels.h"

namespace dspattn::cuda {
namespace {

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

void some_kernel() {}

TEST(EmulatedRules, AKernelIsAllowedOneAmountOfSharedMemory) {
  const auto allow = [](int bytes) {
    return cudaFuncSetAttribute(&some_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  EXPECT_EQ(allow(100'000), cudaSuccess);
  EXPECT_EQ(allow(100'000), cudaSuccess);
  EXPECT_EQ(allow(50'000), cudaErrorInvalidValue);
  EXPECT_EQ(allow(1 << 20), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace dspattn::cuda
