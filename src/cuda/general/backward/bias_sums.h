// The gradient of a bias: dS summed over the dimensions that the bias is broadcast over, in a fixed order
// (bias_walk.h).
#pragma once

#include <cstdint>

#include "cuda/general/backward/bias_walk.h"
#include "cuda/general/backward/params.h"
#include "cuda/general/backward/products.h"
#include "cuda/general/backward/scores.h"
#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::general::backward {

// One number, in its tensor's type or of a part.
template <typename C>
__device__ __forceinline__ void store_bias_element(const BackwardParams& params, const BiasPart& part, int row, int key,
                                                   float value) {
  const BiasGradient& g = params.bias_gradient;
  if (row >= g.extent[2] || key >= g.extent[3]) return;
  if (g.sums_rows != 0 || g.sums_keys != 0) {
    const std::int64_t plane = static_cast<std::int64_t>(part.sequence) * params.work.heads.value + part.head;
    params.prepared.bias_parts[(plane * g.extent[2] + row) * g.extent[3] + key] = value;
    return;
  }
  const int batch = g.extent[0] > 1 ? part.sequence : 0, head = g.extent[1] > 1 ? part.head : 0;
  const std::int64_t at = batch * g.stride[0] + head * g.stride[1] + row * g.stride[2] + key * g.stride[3];
  if (g.is_fp32 != 0) {
    static_cast<float*>(g.data)[at] = value;
  } else {
    static_cast<std::uint16_t*>(g.data)[at] = static_cast<std::uint16_t>(pack<C>(value, value));
  }
}

// What a CTA has added up, to memory. `scratch`: of shared memory, 32 words a warp. The sums of 16 rows hold a Block.
template <typename C>
__device__ __forceinline__ void store_bias(const BackwardParams& params, const BiasPart& part, std::uint32_t scratch,
                                           float (&sums)[C::Queries::kRowBlocks][C::Queries::kColumns / 2]) {
  using Q = typename C::Queries;
  const BiasGradient& g = params.bias_gradient;
  const auto lane = static_cast<int>(own_lane());
  const int warp = own_thread() >> 5;
  const auto key_of = [&](int place) {
    const int column = 8 * (place >> 1) + 2 * (lane & 3) + (place & 1);
    const int key =
        tile::key_of_column<C::kLayout, C::kTileK>(params.tiles, params.tiles.part(part.key_tiles.begin), column);
    return key < 0 ? g.extent[3] : params.tiles.first_key(part.key_tiles.begin) + key;
  };
  if (g.sums_keys != 0) {  // a lane's keys, then its quad's
#pragma unroll
    for (int i = 0; i < 2 * Q::kRowBlocks; ++i) {
      float sum = 0;
#pragma unroll
      for (int place = 0; place < C::kTileK / 4; ++place) sum += sums[i / 2][element_of(place, i % 2)];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      sums[i / 2][i % 2] = sum;
    }
  }
  if (g.sums_rows == 0) {
#pragma unroll
    for (int i = 0; i < 2 * Q::kRowBlocks; ++i) {
      const int row = part.row_tile * Q::kTileQ + warp * 16 * Q::kRowBlocks + 8 * i + (lane >> 2);
      if (g.sums_keys != 0) {
        if ((lane & 3) == 0) store_bias_element<C>(params, part, row, 0, sums[i / 2][i % 2]);
        continue;
      }
#pragma unroll
      for (int place = 0; place < C::kTileK / 4; ++place) {
        store_bias_element<C>(params, part, row, key_of(place), sums[i / 2][element_of(place, i % 2)]);
      }
    }
    return;
  }
  // A lane's rows, then its warp's, then the CTA's: for every key of the lane; where keys are summed too, the first
  // counts. Registers cannot be counted through.
  __syncthreads();  // all have left the rows, whose place the warps' sums take
#pragma unroll
  for (int place = 0; place < C::kTileK / 4; ++place) {
    float sum = 0, of_all = 0;
#pragma unroll
    for (int i = 0; i < 2 * Q::kRowBlocks; ++i) {
      sum += sums[i / 2][element_of(place, i % 2)];
      of_all += sums[i / 2][i % 2];
    }
    if (g.sums_keys != 0) sum = of_all;
#pragma unroll
    for (int x = 4; x < 32; x *= 2) sum += __shfl_xor_sync(~0u, sum, x);
    if (lane < 4) {
      ptx::store_shared(scratch + static_cast<std::uint32_t>(4 * (warp * C::kTileK + 4 * place + lane)),
                        __float_as_uint(sum));
    }
  }
  __syncthreads();  // all warps' sums are there
  if (warp != 0 || lane >= 4) return;
#pragma unroll 1
  for (int place = 0; place < (g.sums_keys != 0 ? 1 : C::kTileK / 4); ++place) {
    float sum = 0;
    for (int other = 0; other < Q::kWarps; ++other) {
      sum += __uint_as_float(
          ptx::load_shared(scratch + static_cast<std::uint32_t>(4 * (other * C::kTileK + 4 * place + lane))));
    }
    if (g.sums_keys == 0) {
      store_bias_element<C>(params, part, 0, key_of(place), sum);
    } else if (lane == 0) {
      store_bias_element<C>(params, part, 0, 0, sum);
    }
  }
}

// Where a walk begins.
template <typename C>
__device__ __forceinline__ void clear_sums(Target target,
                                           float (&sums)[C::Queries::kRowBlocks][C::Queries::kColumns / 2]) {
#pragma unroll
  for (int block = 0; block < C::Queries::kRowBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < C::Queries::kColumns / 2; ++i) {
      sums[block][i] = target == Target::references && i < 2 ? -INFINITY : 0.0f;
    }
  }
}

}  // namespace dspattn::cuda::general::backward
