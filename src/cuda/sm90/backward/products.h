// The five products of a consumer warpgroup: operands in shared memory, how they are issued.
#pragma once

#include <cstdint>

#include "cuda/blocks/scores16.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_stored_shapes.h"
#include "cuda/sm90/backward/shared.h"

namespace dspattn::cuda::sm90::backward {

template <typename C>
struct Products {
  static constexpr std::uint32_t kPanelQ = C::kPanelQBytes >> 4;  // in descriptors' units
  static constexpr std::uint32_t kPanelK = C::kPanelKBytes >> 4;
  static constexpr std::uint32_t kDepthStep =
      16 * 128 >> 4;  // 16 rows of an operand that is stored by rows of the depth

  const Shared<C>& shared;
  int index;  // of this warpgroup

  float d_k[C::kGradientColumns / 2], d_v[C::kGradientColumns / 2];

  __device__ __forceinline__ Products(const Shared<C>& s, int warpgroup) : shared(s), index(warpgroup) {}

  // Descriptors' low words. K-major, and by rows of the depth, whose panels lie panel_bytes apart.
  __device__ __forceinline__ static std::uint32_t major(const std::uint8_t* tile, int offset) {
    return ptx::descriptor_low(ptx::shared_address(tile) + static_cast<std::uint32_t>(offset), 16);
  }
  __device__ __forceinline__ static std::uint32_t depth_rows(const std::uint8_t* tile, int offset, int panel_bytes) {
    return ptx::descriptor_low(ptx::shared_address(tile) + static_cast<std::uint32_t>(offset),
                               static_cast<std::uint32_t>(panel_bytes));
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < C::kGradientColumns / 2; ++i) d_k[i] = d_v[i] = 0;
  }

  // d = A B^T over a head dim: the scores Q K^T, or dP = dO V^T. A is a query tile, B a key tile.
  __device__ __forceinline__ void issue_scores(Scores<C>& d, const std::uint8_t* queries, const std::uint8_t* keys) {
    const std::uint32_t a = major(queries, C::kSplit == Split::queries ? index * 64 * 128 : 0);
    const std::uint32_t b = major(keys, C::kSplit == Split::keys ? index * C::kTileK * 128 : 0);
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      const std::uint64_t own = ptx::descriptor(a + (step / 4) * kPanelQ + (step % 4) * 2);
      const std::uint64_t other = ptx::descriptor(b + (step / 4) * kPanelK + (step % 4) * 2);
      if (step == 0) {
        ptx::wgmma_stored_first<C::kType, 0, 0>(d, own, other);
      } else {
        ptx::wgmma_stored<C::kType, 0, 0>(d, own, other);
      }
    }
  }

  // dQ / scale = dS K over the key tile.
  __device__ __forceinline__ void issue_d_q(float (&d)[C::kSumColumns / 2]) {
    const std::uint32_t a = major(shared.d_scores, C::kSplit == Split::queries ? index * 64 * 128 : 0);
    constexpr int kHalf = C::kSplit == Split::keys ? C::kSumColumns / 64 * C::kPanelKBytes : 0;
    const std::uint32_t b = depth_rows(shared.k, index * kHalf, C::kPanelKBytes);
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step) {
      const std::uint64_t own = ptx::descriptor(a + (step / 4) * kPanelQ + (step % 4) * 2);
      const std::uint64_t other = ptx::descriptor(b + step * kDepthStep);
      if (step == 0) {
        ptx::wgmma_stored_first<C::kType, 0, 1>(d, own, other);
      } else {
        ptx::wgmma_stored<C::kType, 0, 1>(d, own, other);
      }
    }
  }

  // d += A^T B over the query tile: dV with A = P and B = dO, dK with A = dS and B = Q.
  __device__ __forceinline__ void issue_gradient(float (&d)[C::kGradientColumns / 2], const std::uint8_t* weights,
                                                 const std::uint8_t* queries) {
    constexpr int kHalf = C::kSplitsColumns ? C::kGradientColumns / 64 * C::kPanelQBytes : 0;
    const std::uint32_t a = depth_rows(weights, C::kSplitsColumns ? 0 : index * C::kPanelQBytes, C::kPanelQBytes);
    const std::uint32_t b = depth_rows(queries, index * kHalf, C::kPanelQBytes);
#pragma unroll
    for (int step = 0; step < C::kTileQ / 16; ++step) {
      ptx::wgmma_stored<C::kType, 1, 1>(d, ptx::descriptor(a + step * kDepthStep),
                                        ptx::descriptor(b + step * kDepthStep));
    }
  }
};

}  // namespace dspattn::cuda::sm90::backward
