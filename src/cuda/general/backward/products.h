// A warp's products on mma.sync, or in full fp32 without tensor cores. Tiles lie in shared memory, rows C::kStride
// bytes apart.
#pragma once

#include <cstdint>

#include "cuda/general/backward/config.h"
#include "cuda/general/products.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::general::backward {

// What depends on it is computed where it is needed, not kept over the main loop: registers are short.
__device__ __forceinline__ int own_thread() { return ptx::opaque(static_cast<int>(threadIdx.x)); }
__device__ __forceinline__ std::uint32_t own_lane() { return static_cast<std::uint32_t>(own_thread()) & 31; }

// 16 rows x 32 keys of a lane: of register block b rows g, g, g + 8, g + 8 and columns 8b + 2t, 8b + 2t + 1, again.
template <typename C>
using Block = float[C::kTileK / 2];

__device__ __forceinline__ float (&four(float* registers))[4] { return *reinterpret_cast<float(*)[4]>(registers); }
__device__ __forceinline__ const std::uint32_t (&four(const std::uint32_t* registers))[4] {
  return *reinterpret_cast<const std::uint32_t(*)[4]>(registers);
}

__device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// acc = rows * keys^T: 16 kBlocks rows from `rows` on, 32 keys from `keys` on. Step by step as the forward does it, so
// that scores have the same bits.
template <typename C, int kBlocks>
__device__ __forceinline__ void multiply_rows(Block<C> (&acc)[kBlocks], std::uint32_t rows, std::uint32_t keys) {
#pragma unroll
  for (Block<C>& block : acc) {
#pragma unroll
    for (float& x : block) x = 0;
  }
  const std::uint32_t lane = own_lane();
  if constexpr (C::kKind == Kind::precise) {
    const std::uint32_t own = rows + (lane >> 2) * C::kStride;
    const std::uint32_t key = keys + 2 * (lane & 3) * C::kStride;
#pragma unroll 1
    for (std::uint32_t at = 0; at < C::kRowBytes; at += 16) {
      float4 a[2 * kBlocks];
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) a[i] = ptx::load_shared_16(own + i * 8 * C::kStride + at);
#pragma unroll
      for (int column = 0; column < C::kTileK / 4; ++column) {  // of the lane's: 8 (column / 2) + 2t + column % 2
        const float4 b = ptx::load_shared_16(key + (column / 2 * 8 + column % 2) * C::kStride + at);
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          float& sum = acc[i / 2][4 * (column / 2) + column % 2 + 2 * (i % 2)];
          sum = dot(a[i], b, sum);
        }
      }
    }
  } else {
    // ldmatrix: of rows, lane l addresses row l % 16 and of 32 bytes the first or the second half; of keys, rows of two
    // blocks of eight.
    const std::uint32_t own = rows + (lane & 15) * C::kStride + (lane >> 4) * 16;
    const std::uint32_t key = keys + ((lane >> 4) * 8 + (lane & 7)) * C::kStride + (lane >> 3 & 1) * 16;
    [[maybe_unused]] constexpr int kAtOnce = C::kPlain ? 8 : 4;  // with features registers are shorter
#pragma unroll kAtOnce
    for (std::uint32_t at = 0; at < C::kRowBytes; at += 32) {
      std::uint32_t a[kBlocks][4];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) ptx::ldmatrix_x4(a[block], own + block * 16 * C::kStride + at);
#pragma unroll
      for (int pair = 0; pair < C::kTileK / 16; ++pair) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4(b, key + pair * 16 * C::kStride + at);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          ptx::mma_32_bytes<ElementOf<C::kType>>(four(acc[block] + 8 * pair), a[block], b[0], b[1]);
          ptx::mma_32_bytes<ElementOf<C::kType>>(four(acc[block] + 8 * pair + 4), a[block], b[2], b[3]);
        }
      }
    }
  }
}

template <typename C>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  return C::kType == DType::bf16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
}

// sums += a * rows, 16-bit: a, the left operand of 16 kBlocks rows; rows, 16 of them as the lane's ldmatrix addresses
// them, from the first of the columns on.
template <typename C, int kBlocks, int kElements>
__device__ __forceinline__ void add_sixteen(float (&sums)[kBlocks][kElements], const std::uint32_t (&a)[kBlocks][4],
                                            std::uint32_t rows) {
  using Element = ElementOf<C::kType>;
#pragma unroll
  for (int columns = 0; columns < kElements / 4; columns += 2) {
    std::uint32_t b[4];
    ptx::ldmatrix_x4_trans(b, rows + columns * 16);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      ptx::mma_32_bytes<Element>(four(sums[i] + 4 * columns), a[i], b[0], b[1]);
      ptx::mma_32_bytes<Element>(four(sums[i] + 4 * columns + 4), a[i], b[2], b[3]);
    }
  }
}

// sums += values * keys: 16 kBlocks rows by columns of K, whose tile is at `keys`, from the first of them on.
template <typename C, int kBlocks>
__device__ __forceinline__ void add_queries(float (&sums)[kBlocks][C::Queries::kColumns / 2],
                                            const Block<C> (&values)[kBlocks], std::uint32_t keys) {
  using Element = ElementOf<C::kType>;
  const std::uint32_t lane = own_lane();
  if constexpr (C::kKind == Kind::precise) {
    const auto quad = static_cast<int>(lane & 28);
    const std::uint32_t own = keys + 8 * (lane & 3);
#pragma unroll
    for (int column = 0; column < C::kTileK / 4; ++column) {
#pragma unroll 1
      for (int source = 0; source < 4; ++source) {
        float value[kBlocks][2];
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          value[i / 2][i % 2] =
              __shfl_sync(~0u, values[i / 2][4 * (column / 2) + column % 2 + 2 * (i % 2)], quad + source);
        }
        const std::uint32_t key = own + (column / 2 * 8 + 2 * source + column % 2) * C::kStride;
#pragma unroll
        for (int columns = 0; columns < C::Queries::kColumns / 8; ++columns) {
          std::uint32_t bits[2];
          ptx::load_shared_bytes<8>(key + columns * 32, bits);
#pragma unroll
          for (int i = 0; i < 4 * kBlocks; ++i) {
            float& sum = sums[i / 4][4 * columns + i % 4];
            sum = fmaf(value[i / 4][i / 2 % 2], __uint_as_float(bits[i % 2]), sum);
          }
        }
      }
    }
  } else if constexpr (C::kIsFp32) {  // keys 2t and 2t + 1 of eight as columns t and t + 4 of the operand
    const std::uint32_t own = keys + 2 * (lane & 3) * C::kStride + 4 * (lane >> 2);
#pragma unroll
    for (int step = 0; step < C::kTileK / 8; ++step) {
      std::uint32_t a[kBlocks][4];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[block][i] = ptx::nearest_tf32(values[block][4 * step + (i & 1) * 2 + (i >> 1)]);
      }
#pragma unroll
      for (int columns = 0; columns < C::Queries::kColumns / 8; ++columns) {
        const std::uint32_t at = own + step * 8 * C::kStride + columns * 32;
        const std::uint32_t b0 = ptx::load_shared(at), b1 = ptx::load_shared(at + C::kStride);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          ptx::mma_32_bytes<Element>(four(sums[block] + 4 * columns), a[block], b0, b1);
        }
      }
    }
  } else {
    const std::uint32_t own = keys + (lane & 15) * C::kStride + (lane >> 4) * 16;
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
      std::uint32_t a[kBlocks][4];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[block][i] = pack<C>(values[block][8 * step + 2 * i], values[block][8 * step + 2 * i + 1]);
      }
      add_sixteen<C>(sums, a, own + step * 16 * C::kStride);
    }
  }
}

// A lane's part of a gradient of 32 keys: of keys 16m + g and 16m + g + 8 columns 8c + 2t and 8c + 2t + 1.
template <typename C>
using KeySums = float[2][C::Keys::kColumns / 2];

// sums += weights^T * rows: kTileQ rows of 32 weights at `weights`, as many rows of Q or dO, of which the warp's
// columns begin at `rows`.
template <typename C>
__device__ __forceinline__ void add_keys(KeySums<C>& sums, std::uint32_t weights, std::uint32_t rows) {
  using Element = ElementOf<C::kType>;
  using K = typename C::Keys;
  const std::uint32_t lane = own_lane();
  if constexpr (C::kKind == Kind::precise) {
    const std::uint32_t own = weights + 4 * (lane >> 2), row = rows + 8 * (lane & 3);
#pragma unroll 1
    for (std::uint32_t i = 0; i < K::kTileQ; ++i) {
      float weight[4];  // of keys g, g + 8, g + 16, g + 24
#pragma unroll
      for (int k = 0; k < 4; ++k) weight[k] = __uint_as_float(ptx::load_shared(own + i * K::kWeightStride + k * 32));
#pragma unroll
      for (int columns = 0; columns < K::kColumns / 8; ++columns) {
        std::uint32_t bits[2];
        ptx::load_shared_bytes<8>(row + i * C::kStride + columns * 32, bits);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          float& sum = sums[k / 4][4 * columns + k % 4];
          sum = fmaf(weight[k / 2], __uint_as_float(bits[k % 2]), sum);
        }
      }
    }
  } else if constexpr (C::kIsFp32) {  // rows 2t and 2t + 1 of eight as columns t and t + 4 of the operand
    const std::uint32_t own = weights + 2 * (lane & 3) * K::kWeightStride + 4 * (lane >> 2);
    const std::uint32_t row = rows + 2 * (lane & 3) * C::kStride + 4 * (lane >> 2);
#pragma unroll
    for (int step = 0; step < K::kTileQ / 8; ++step) {
      std::uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        a[i / 4][i % 4] =
            ptx::load_shared(own + (step * 8 + (i >> 1 & 1)) * K::kWeightStride + (i >> 2) * 64 + (i & 1) * 32);
      }
#pragma unroll
      for (int columns = 0; columns < K::kColumns / 8; ++columns) {
        const std::uint32_t at = row + step * 8 * C::kStride + columns * 32;
        const std::uint32_t b0 = ptx::load_shared(at), b1 = ptx::load_shared(at + C::kStride);
#pragma unroll
        for (int m = 0; m < 2; ++m) ptx::mma_32_bytes<Element>(four(sums[m] + 4 * columns), a[m], b0, b1);
      }
    }
  } else {
    const std::uint32_t own = weights + ((lane & 7) + (lane >> 4) * 8) * K::kWeightStride + (lane >> 3 & 1) * 16;
    const std::uint32_t row = rows + (lane & 15) * C::kStride + (lane >> 4) * 16;
#pragma unroll
    for (int step = 0; step < K::kTileQ / 16; ++step) {
      std::uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) ptx::ldmatrix_x4_trans(a[m], own + step * 16 * K::kWeightStride + m * 32);
      add_sixteen<C>(sums, a, row + step * 16 * C::kStride);
    }
  }
}

// A warp's chunk of a query tile's dQ.
template <typename C>
using ShareSums = float[C::Share::kRowBlocks][C::Share::kColumns / 2];

// share += d_scores * keys of one key tile, 16-bit: as the lane's ldmatrix addresses them.
template <typename C>
__device__ __forceinline__ void add_share_of_lanes(ShareSums<C>& share, std::uint32_t d_scores, std::uint32_t keys) {
  using K = typename C::Keys;
  using S = typename C::Share;
#pragma unroll
  for (int step = 0; step < C::kTileK / 16; ++step) {
    std::uint32_t a[S::kRowBlocks][4];
#pragma unroll
    for (int i = 0; i < S::kRowBlocks; ++i) {
      if constexpr (C::kKeyRows) {
        ptx::ldmatrix_x4_trans(a[i], d_scores + step * 16 * K::kWeightStride + i * 32);
      } else {
        ptx::ldmatrix_x4(a[i], d_scores + i * 16 * K::kWeightStride + step * 32);
      }
    }
    add_sixteen<C>(share, a, keys + step * 16 * C::kStride);
  }
}

// share += d_scores * keys of one key tile: d_scores at the warp's first row, keys at its first column.
template <typename C>
__device__ __forceinline__ void add_share(ShareSums<C>& share, std::uint32_t d_scores, std::uint32_t keys) {
  using Element = ElementOf<C::kType>;
  using K = typename C::Keys;
  using S = typename C::Share;
  const std::uint32_t lane = own_lane();
  if constexpr (C::kIsFp32) {  // keys 2t and 2t + 1 of eight as columns t and t + 4 of the operand
    const std::uint32_t row = d_scores + (lane >> 2) * K::kWeightStride + 8 * (lane & 3);
    const std::uint32_t own = keys + 2 * (lane & 3) * C::kStride + 4 * (lane >> 2);
#pragma unroll
    for (int step = 0; step < C::kTileK / 8; ++step) {
      std::uint32_t a[S::kRowBlocks][4];
#pragma unroll
      for (int i = 0; i < 2 * S::kRowBlocks; ++i) {
        std::uint32_t pair[2];
        ptx::load_shared_bytes<8>(row + i * 8 * K::kWeightStride + step * 32, pair);
        a[i / 2][i % 2] = pair[0];
        a[i / 2][i % 2 + 2] = pair[1];
      }
#pragma unroll
      for (int columns = 0; columns < S::kColumns / 8; ++columns) {
        const std::uint32_t at = own + step * 8 * C::kStride + columns * 32;
        const std::uint32_t b0 = ptx::load_shared(at), b1 = ptx::load_shared(at + C::kStride);
#pragma unroll
        for (int i = 0; i < S::kRowBlocks; ++i) ptx::mma_32_bytes<Element>(four(share[i] + 4 * columns), a[i], b0, b1);
      }
    }
  } else {
    const std::uint32_t row = C::kKeyRows ? ((lane & 7) + (lane >> 4) * 8) * K::kWeightStride + (lane >> 3 & 1) * 16
                                          : (lane & 15) * K::kWeightStride + (lane >> 4) * 16;
    add_share_of_lanes<C>(share, d_scores + row, keys + (lane & 15) * C::kStride + (lane >> 4) * 16);
  }
}

// 16 rows of weights (or dS) to shared memory, `rows` being the first of them.
template <typename C>
__device__ __forceinline__ void store_weights(std::uint32_t rows, const Block<C>& values) {
  using K = typename C::Keys;
  const std::uint32_t lane = own_lane();
  const std::uint32_t own = rows + (lane >> 2) * K::kWeightStride + 2 * (lane & 3) * C::kElementBytes;
#pragma unroll
  for (int i = 0; i < C::kTileK / 4; ++i) {
    const std::uint32_t at = own + (i & 1) * 8 * K::kWeightStride + (i >> 1) * 8 * C::kElementBytes;
    if constexpr (C::kIsFp32) {
      const auto word = [](float x) { return C::kIsTf32 ? ptx::nearest_tf32(x) : __float_as_uint(x); };
      ptx::store_shared(at, word(values[2 * i]));
      ptx::store_shared(at + 4, word(values[2 * i + 1]));
    } else {
      ptx::store_shared(at, pack<C>(values[2 * i], values[2 * i + 1]));
    }
  }
}

}  // namespace dspattn::cuda::general::backward
