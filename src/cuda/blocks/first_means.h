// Means of V over the first keys of a sequence, as many as each row sees: for rows that see no block but the first
// (rest = mean). Their tile of V lies in shared memory when their last product is issued, and the tensor core adds it
// up beside that product: so no table holds an entry for each of these rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/blocks/sink.h"
#include "cuda/blocks/views.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/wgmma_shapes.h"
#include "cuda/tile/first_keys.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::blocks {

// Of a thread's two rows: how many keys they see.
struct FirstCounts {
  int row0, row1;
};

template <typename C>
struct FirstSums {
  static_assert(C::kType == DType::bf16 && C::kTileK == tile::kBlockKeys);
  static constexpr std::uint32_t kOnes = 0x3F803F80u;

  float (&sums)[C::kHeadDim / 2];

  // The sums of V's tile, whose operand descriptor has the low word `v`: of every group's first two keys, then of its
  // last two, with weights of 1 where a row sees the key. One after the other: registers are short.
  __device__ __forceinline__ void compute(std::uint32_t v, const tile::KeyMap& keys, const FirstCounts& counts,
                                          int t) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const tile::FirstKeys row0(keys, counts.row0, half, t), row1(keys, counts.row1, half, t);
      std::uint32_t ones[C::kTileK / 8];
#pragma unroll
      for (int m = 0; m < C::kTileK / 16; ++m) {
        ones[2 * m] = row0.seen(m) & kOnes;
        ones[2 * m + 1] = row1.seen(m) & kOnes;
        ptx::pin(ones[2 * m]);
        ptx::pin(ones[2 * m + 1]);
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < C::kTileK / 32; ++step) {
        const std::uint32_t* a = ones + 4 * step;
        ptx::wgmma_sparse<C::kType, 0>(sums, a[0], a[1], a[2], a[3], ptx::descriptor(v + step * (32 * 128 >> 4)),
                                       half == 0 ? tile::kLowerTwoOfFour : tile::kUpperTwoOfFour,
                                       half + step > 0 ? 1 : 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
    }
  }

  // When they are known. A key that a row does not see may hold what is not finite, and 0 times that is NaN: then a
  // warp's rows add up their own keys, at `v` on, row by row.
  __device__ __forceinline__ void settle(const std::uint16_t* v, std::int64_t row_stride, int columns,
                                         const FirstCounts& counts, int t) const {
    float spoilt = 0;
#pragma unroll
    for (const float sum : sums) spoilt = fmaf(sum, 0.0f, spoilt);
    if (__any_sync(~0u, std::isnan(spoilt) ? 1 : 0) == 0) return;
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll 1
    for (int key = 0; key < max(counts.row0, counts.row1); ++key) {
      const std::uint16_t* row = v + key * row_stride;
#pragma unroll
      for (int i = 0; i < C::kHeadDim / 2; i += 4) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 2 * i + 2 * t + c;
          const float x = column < columns ? __uint_as_float(std::uint32_t{row[column]} << 16) : 0.0f;
          if (key < counts.row0) sums[i + c] += x;
          if (key < counts.row1) sums[i + 2 + c] += x;
        }
      }
    }
  }

  // The weights of the rows' pruned keys times their means.
  __device__ __forceinline__ void add(const RowSums& rest, const FirstCounts& counts,
                                      float (&out)[C::kHeadDim / 2]) const {
    const float share0 = rest.sum0 * ptx::reciprocal_fast(static_cast<float>(max(counts.row0, 1)));
    const float share1 = rest.sum1 * ptx::reciprocal_fast(static_cast<float>(max(counts.row1, 1)));
#pragma unroll
    for (int i = 0; i < C::kHeadDim / 2; i += 4) {
      out[i] = fmaf(share0, sums[i], out[i]);
      out[i + 1] = fmaf(share0, sums[i + 1], out[i + 1]);
      out[i + 2] = fmaf(share1, sums[i + 2], out[i + 2]);
      out[i + 3] = fmaf(share1, sums[i + 3], out[i + 3]);
    }
  }
};

}  // namespace dspattn::cuda::blocks
