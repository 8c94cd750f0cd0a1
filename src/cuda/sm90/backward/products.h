// The products of a key warpgroup: operands in shared memory and registers, how they are issued.
#pragma once

#include <cstdint>

#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_stored_shapes.h"
#include "cuda/sm90/backward/shared.h"

namespace dspattn::cuda::sm90::backward {

// Scores, or dP, of a warpgroup's 64 keys and a query tile: accumulators with keys as rows.
template <typename C>
using TileScores = float[C::kTileQ / 2];

// The same in 16 bits as an operand in registers: word 4s + i is register i of step s over 16 queries.
template <typename C>
using TileOperand = std::uint32_t[C::kTileQ / 4];

template <typename C>
using Gradient = float[C::kHeadDim / 2];

// d = A B^T over a head dim: the scores K Q^T; or, added to what d holds, dP = V dO^T. A is part `part` of a key tile,
// B a query tile.
template <typename C, bool kAdds = false>
__device__ __forceinline__ void issue_scores(TileScores<C>& d, const std::uint8_t* keys, int part,
                                             const std::uint8_t* queries) {
  const auto low = [](const std::uint8_t* tile, int row) {
    return ptx::descriptor_low(ptx::shared_address(tile) + static_cast<std::uint32_t>(row) * 128, 16);
  };
  const std::uint32_t a = low(keys, part * kPartKeys);
  const std::uint32_t b = low(queries, 0);
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    const std::uint64_t own = ptx::descriptor(a + (step / 4) * (C::kPanelKBytes >> 4) + (step % 4) * 2);
    const std::uint64_t other = ptx::descriptor(b + (step / 4) * (C::kPanelQBytes >> 4) + (step % 4) * 2);
    if (step == 0 && !kAdds) {
      ptx::wgmma_stored_first<C::kType, 0, 0>(d, own, other);
    } else {
      ptx::wgmma_stored<C::kType, 0, 0>(d, own, other);
    }
  }
}

// d += A B over the query tile: dV with A = P and B = dO, dK with A = dS and B = Q.
template <typename C>
__device__ __forceinline__ void issue_gradient(Gradient<C>& d, const TileOperand<C>& a, const std::uint8_t* queries) {
  const std::uint32_t b = ptx::descriptor_low(ptx::shared_address(queries), C::kPanelQBytes);
#pragma unroll
  for (int step = 0; step < C::kTileQ / 16; ++step) {
    constexpr std::uint32_t kDepthStep = 16 * 128 >> 4;  // 16 rows
    ptx::wgmma_gradient<C::kType>(d, a + 4 * step, ptx::descriptor(b + step * kDepthStep));
  }
}

// The same with A from shared memory: part `part` of a tile of dS. Without `accumulate` d += 0 becomes d = A B.
template <typename C>
__device__ __forceinline__ void issue_gradient(Gradient<C>& d, const std::uint8_t* d_scores, int part,
                                               const std::uint8_t* queries, bool accumulate) {
  const std::uint32_t a =
      ptx::descriptor_low(ptx::shared_address(d_scores) + static_cast<std::uint32_t>(part * kPartKeys) * 128, 16);
  const std::uint32_t b = ptx::descriptor_low(ptx::shared_address(queries), C::kPanelQBytes);
#pragma unroll
  for (int step = 0; step < C::kTileQ / 16; ++step) {
    constexpr std::uint32_t kDepthStep = 16 * 128 >> 4;  // 16 rows
    ptx::wgmma_gradient_stored<C::kType>(d, ptx::descriptor(a + step * 2), ptx::descriptor(b + step * kDepthStep),
                                         step > 0 || accumulate ? 1 : 0);
  }
}

}  // namespace dspattn::cuda::sm90::backward
