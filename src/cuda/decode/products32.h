// The two products of a warp's rows in fp32, without tensor cores: memory's bandwidth leaves time for up to 16 rows.
#pragma once

#include <cstdint>

#include "cuda/decode/weigh.h"
#include "cuda/ptx/barrier.h"

namespace dspattn::cuda::decode {

template <typename C>
struct Products32 {
  static constexpr int kColumns = C::kHeadDim / 32;          // of a lane: neighbours
  static constexpr int kKeys = C::kTileK / 32;               // of a lane: every 32nd
  static constexpr int kChunks = C::kHeadDim <= 64 ? 4 : 2;  // of the score product at once: registers
  float out[kWarpRows][kColumns] = {};

  __device__ __forceinline__ static std::uint32_t at(std::uint32_t tile, int rows, int row, int chunk) {
    return tile + static_cast<std::uint32_t>((chunk >> 3) * rows * 128 + tile::swizzled_offset(row, chunk & 7));
  }

  // Four rows at once, so that K is read once for them.
  __device__ __forceinline__ static void score(std::uint32_t q, int q_rows, int first_row, std::uint32_t k,
                                               const WarpTiles& tiles, int stride, int rows, int lane) {
#pragma unroll 1
    for (int base = 0; base < rows; base += 4) {
      float scores[4][kKeys] = {};
#pragma unroll kChunks
      for (int chunk = 0; chunk < C::kHeadDim / 4; ++chunk) {
        float4 keys[kKeys];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) keys[i] = ptx::load_shared_16(at(k, C::kTileK, lane + 32 * i, chunk));
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float4 x = ptx::load_shared_16(at(q, q_rows, first_row + base + r, chunk));
#pragma unroll
          for (int i = 0; i < kKeys; ++i) {
            scores[r][i] = fmaf(x.x, keys[i].x, scores[r][i]);
            scores[r][i] = fmaf(x.y, keys[i].y, scores[r][i]);
            scores[r][i] = fmaf(x.z, keys[i].z, scores[r][i]);
            scores[r][i] = fmaf(x.w, keys[i].w, scores[r][i]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (base + r >= rows) break;
        auto* to = reinterpret_cast<float*>(tiles.scores + (base + r) * stride) + lane;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) to[32 * i] = scores[r][i];
      }
    }
  }

  __device__ __forceinline__ void shrink(float by, int lanes, int rows, int) {
    if (__all_sync(~0u, by == 1.0f)) return;
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      const float factor = __shfl_sync(~0u, by, (row & (rows - 1)) * lanes);
#pragma unroll
      for (float& x : out[row]) x *= factor;
    }
  }

  __device__ __forceinline__ void accumulate_whole(const WarpTiles& tiles, std::uint32_t v, int stride, int rows,
                                                   int lane) {
    accumulate(tiles, v, 0, stride, rows, lane);
  }
  __device__ __forceinline__ void accumulate_gathered(const WarpTiles& tiles, std::uint32_t v, int stride, int rows,
                                                      int lane) {
    accumulate(tiles, v, 1, stride, rows, lane);
  }

  __device__ __forceinline__ void deposit(float* to, int rows, int lane) const {
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      if (row >= rows) break;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) to[row * C::kHeadDim + lane * kColumns + i] = out[row][i];
    }
  }

 private:
  // Keys without weight are not multiplied: what V holds there reaches no row.
  __device__ __forceinline__ void accumulate(const WarpTiles& tiles, std::uint32_t v, int gather, int stride, int rows,
                                             int lane) {
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      if (row >= rows) break;
      const auto* weights = reinterpret_cast<const float2*>(tiles.weights + row * stride);
      const std::uint8_t* codes = tiles.codes + row * C::kGroups;
#pragma unroll 1
      for (int group = 0; group < C::kGroups; ++group) {
        const float2 weight = weights[group];
        const std::uint32_t code = codes[group];
        const auto add = [&](float w, int which) {
          if (w == 0) return;
          const int from = gather != 0 ? 2 * group + which : 4 * group + tile::kept_element(code, which);
          const int in_chunk = lane * kColumns % 4;
          const std::uint32_t address =
              at(v, gather != 0 ? C::kTileK / 2 : C::kTileK, from, lane * kColumns / 4) + 4 * in_chunk;
          std::uint32_t values[kColumns];
          ptx::load_shared_bytes<4 * kColumns>(address, values);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) out[row][i] = fmaf(w, __uint_as_float(values[i]), out[row][i]);
        };
        add(weight.x, 0);
        add(weight.y, 1);
      }
    }
  }
};

}  // namespace dspattn::cuda::decode
