// The two products of a warp's 16 rows on 16-bit tensor cores (mma.sync; g = lane / 4, t = lane % 4).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/decode/weigh.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::decode {

template <typename C>
struct Products16 {
  using Element = std::conditional_t<C::kType == DType::bf16, __nv_bfloat16, __half>;
  // Of the score product, unrolled: a long output leaves few registers.
  static constexpr int kSteps = C::kHeadDim <= 128 ? C::kHeadDim / 16 : 2;
  float out[C::kHeadDim / 8][4] = {};  // rows g and g + 8, columns 8 c + 2 t and the next

  // Address of 16 bytes: chunk `chunk` of row `row` of a tile of `rows` rows.
  __device__ __forceinline__ static std::uint32_t at(std::uint32_t tile, int rows, int row, int chunk) {
    return tile + static_cast<std::uint32_t>((chunk >> 3) * rows * 128 + tile::swizzled_offset(row, chunk & 7));
  }

  // scores[row][key] of the warp's rows, `first_row` being the first of them in q.
  __device__ __forceinline__ static void score(std::uint32_t q, int q_rows, int first_row, std::uint32_t k,
                                               const WarpTiles& tiles, int stride, int rows, int lane) {
    float scores[C::kTileK / 8][4] = {};
    const int matrix = lane >> 3, in_matrix = lane & 7;
#pragma unroll kSteps
    for (int step = 0; step < C::kHeadDim / 16; ++step) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4(a, at(q, q_rows, first_row + (matrix & 1) * 8 + in_matrix, 2 * step + (matrix >> 1)));
#pragma unroll
      for (int pair = 0; pair < C::kTileK / 16; ++pair) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4(b, at(k, C::kTileK, 16 * pair + (matrix >> 1) * 8 + in_matrix, 2 * step + (matrix & 1)));
        ptx::mma_32_bytes<Element>(scores[2 * pair], a, b[0], b[1]);
        ptx::mma_32_bytes<Element>(scores[2 * pair + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = (lane >> 2) + 8 * i;
      if (row >= rows) continue;
      auto* to = reinterpret_cast<float2*>(tiles.scores + row * stride) + (lane & 3);
#pragma unroll
      for (int n = 0; n < C::kTileK / 8; ++n) to[4 * n] = make_float2(scores[n][2 * i], scores[n][2 * i + 1]);
    }
  }

  // Relative to raised references; `by` is the lane's row's in the weigher's order, of `lanes` lanes each.
  __device__ __forceinline__ void shrink(float by, int lanes, int rows, int lane) {
    if (__all_sync(~0u, by == 1.0f)) return;
    const int row = lane >> 2;
    const float by0 = __shfl_sync(~0u, by, (row & (rows - 1)) * lanes);
    const float by1 = __shfl_sync(~0u, by, ((row + 8) & (rows - 1)) * lanes);
#pragma unroll
    for (auto& o : out) {
      o[0] *= by0;
      o[1] *= by0;
      o[2] *= by1;
      o[3] *= by1;
    }
  }

  // Adds weights times V, of which the tile has all rows. Rows past the warp's last repeat earlier ones.
  __device__ __forceinline__ void accumulate_whole(const WarpTiles& tiles, std::uint32_t v, int stride, int rows,
                                                   int lane) {
    const int row = lane;
    const std::uint32_t weights = weights_at(tiles, stride, rows, lane);
#pragma unroll
    for (int slice = 0; slice < C::kTileK / 32; ++slice) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4(a, weights + 32 * static_cast<std::uint32_t>(slice));
      const std::uint32_t metadata = metadata_of(tiles, slice, rows, lane);
#pragma unroll
      for (int chunk = 0; chunk < C::kHeadDim / 8; ++chunk) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, at(v, C::kTileK, 32 * slice + row, chunk));
        ptx::mma_sparse_64_bytes<Element, 0>(out[chunk], a, b, metadata);
      }
    }
  }
  // The same where the tile has the kept rows alone.
  __device__ __forceinline__ void accumulate_gathered(const WarpTiles& tiles, std::uint32_t v, int stride, int rows,
                                                      int lane) {
    const int row = lane & 15;
    const std::uint32_t weights = weights_at(tiles, stride, rows, lane);
#pragma unroll
    for (int slice = 0; slice < C::kTileK / 32; ++slice) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4(a, weights + 32 * static_cast<std::uint32_t>(slice));
#pragma unroll
      for (int chunk = 0; chunk < C::kHeadDim / 8; chunk += 2) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, at(v, C::kTileK / 2, 16 * slice + row, chunk + (lane >> 4)));
        ptx::mma_32_bytes<Element>(out[chunk], a, b[0], b[1]);
        ptx::mma_32_bytes<Element>(out[chunk + 1], a, b[2], b[3]);
      }
    }
  }

  // The warp's rows, of which there are `rows`, to [16][head dim] fp32.
  __device__ __forceinline__ void deposit(float* to, int rows, int lane) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = (lane >> 2) + 8 * i;
      if (row >= rows) continue;
#pragma unroll
      for (int c = 0; c < C::kHeadDim / 8; ++c) {
        float* at = to + row * C::kHeadDim + 8 * c + 2 * (lane & 3);
        *reinterpret_cast<float2*>(at) = make_float2(out[c][2 * i], out[c][2 * i + 1]);
      }
    }
  }

 private:
  // Where this lane's row of a slice's weights begins, for ldmatrix.
  __device__ __forceinline__ static std::uint32_t weights_at(const WarpTiles& tiles, int stride, int rows, int lane) {
    const int row = (lane & 15) & (rows - 1);
    return ptx::shared_address(tiles.weights) + static_cast<std::uint32_t>(row * stride + (lane >> 4) * 16);
  }
  // Of a slice of 32 keys: lanes 0 and 1 of a quad have those of the first and the last 16, row g + 8 in the high half.
  __device__ __forceinline__ static std::uint32_t metadata_of(const WarpTiles& tiles, int slice, int rows, int lane) {
    const int groups = 8 * slice + 4 * (lane & 1);
    const auto of_row = [&](int row) {
      const std::uint8_t* codes = tiles.codes + (row & (rows - 1)) * C::kGroups + groups;
      return tile::metadata_of_codes(*reinterpret_cast<const std::uint32_t*>(codes));
    };
    return of_row(lane >> 2) | of_row((lane >> 2) + 8) << 16;
  }
};

}  // namespace dspattn::cuda::decode
