// The emulated tensor core: products do what the hardware does, and kernels that break a rule are told so.
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_shapes.h"
#include "cuda/ptx/wgmma_stored_shapes.h"
#include "cuda/tile/key_map.h"
#include "emulated_kernels.h"

namespace dspattn::cuda {
namespace {

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

// Both operands in shared memory, by rows or by rows of the depth: M M^T, M M and M^T M of the upper 32 of the depth.
template <int kDepthRowsA, int kDepthRowsB>
void expect_stored() {
  Product product;
  ASSERT_TRUE(run(128, [&] {
                init_barrier(1);
                load_matrix(product.b, kData);
                ptx::mbarrier_wait(kBarrier, 0);
                float d[32];
                const std::uint32_t low = ptx::descriptor_low(kData, 64 * 128);
                // A step of 16 along the depth: 32 bytes of a row, or 16 rows.
                const auto step = [&](int rows, int i) {
                  return ptx::descriptor(low + static_cast<std::uint32_t>(i * (rows != 0 ? 16 * 128 >> 4 : 2)));
                };
                ptx::wgmma_fence();
                ptx::wgmma_stored_first<DType::f16, kDepthRowsA, kDepthRowsB>(d, step(kDepthRowsA, 2),
                                                                              step(kDepthRowsB, 2));
                ptx::wgmma_stored<DType::f16, kDepthRowsA, kDepthRowsB>(d, step(kDepthRowsA, 3), step(kDepthRowsB, 3));
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                std::copy(std::begin(d), std::end(d), product.d[threadIdx.x].begin());
              }).ended);
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < 64; ++column) {
      float expected = 0;
      for (int k = 32; k < 64; ++k) {
        expected += (kDepthRowsA != 0 ? product.b.at(k, row) : product.b.at(row, k)) *
                    (kDepthRowsB != 0 ? product.b.at(k, column) : product.b.at(column, k));
      }
      ASSERT_EQ(product.at(row, column), expected) << row << " " << column;
    }
  }
}

TEST(EmulatedProducts, DenseFromSharedMemory) {
  expect_stored<0, 0>();
  expect_stored<0, 1>();
  expect_stored<1, 1>();
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
