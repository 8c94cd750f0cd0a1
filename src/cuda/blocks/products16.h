// A consumer warpgroup's two products: the registers that hold their operands and results, and how they are issued.
#pragma once

#include <cstdint>

#include "cuda/blocks/scores16.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_shapes.h"

namespace dspattn::cuda::blocks {

template <typename C>
struct Products {
  static constexpr int kQuarters = C::kQuarters;  // 64 keys: one metadata word
  static constexpr int kScoreSteps = C::kScoreSteps;
  static constexpr int kValueSteps = C::kTileK / 32;

  std::uint32_t k_low, v_low, q_low;  // low words of operand descriptors
  std::uint32_t q[kScoreSteps][4];    // A of the scores: the first C::kQSteps steps of it
  float scores[C::kTileK / 2];
  std::uint32_t weights[C::kTileK / 8], metadata[kQuarters];  // sparse A of the output
  float out[C::kHeadDim / 2];

  // Where K, V and the warpgroup's rows of Q lie. No constructor: called after all else is set up, it costs the main
  // loop the fewest instructions.
  template <typename Shared>
  __device__ __forceinline__ void point_to(const Shared& shared, int warpgroup) {
    q_low = ptx::descriptor_low(ptx::shared_address(shared.q) + static_cast<std::uint32_t>(warpgroup) * 64 * 128, 16);
    k_low = ptx::descriptor_low(ptx::shared_address(shared.k), 16);
    v_low = ptx::descriptor_low(ptx::shared_address(shared.v), C::kPanelKBytes);
  }

  // Takes Q's first C::kQSteps steps times 2^-e to registers, in the layout of a wgmma A operand. Returns 0, which is
  // known when all of it has arrived: see mbarrier_arrive_if().
  __device__ __forceinline__ std::uint32_t take_q(const ScoreScales& scales, const std::uint8_t* panels, int warp_row,
                                                  int lane) {
    // Lane l addresses row l % 16 of the warp's, and of 16 columns the first or the last eight.
    const auto lane_row = static_cast<std::uint32_t>(warp_row + (lane & 15));
    const std::uint32_t row = ptx::shared_address(panels) + lane_row * 128;
    const std::uint32_t chunk = (static_cast<std::uint32_t>(lane >> 4) ^ (lane_row & 7)) << 4;
    std::uint32_t loaded = 0;
#pragma unroll
    for (int step = 0; step < C::kQSteps; ++step) {
      const std::uint32_t panel = static_cast<std::uint32_t>(step / 4) * C::kPanelQBytes;
      ptx::load_matrices(row + panel + (chunk ^ static_cast<std::uint32_t>(step % 4) << 5), q[step]);
#pragma unroll
      for (std::uint32_t& pair : q[step]) pair = multiply_pairs<C>(pair, scales.q_scale);
      loaded ^= q[step][0];  // all four arrive at once
    }
    return loaded & scales.opaque_zero;
  }

  // The scores of the tile in `stage`, of item number `number`, which says where the rest of Q lies.
  __device__ __forceinline__ void issue_scores(int stage, int number) {
    const std::uint32_t k = k_low + static_cast<std::uint32_t>(stage) * (C::kTileKBytes >> 4);
#pragma unroll
    for (int step = 0; step < kScoreSteps; ++step) {
      const std::uint64_t b = ptx::descriptor(k + (step / 4) * (C::kPanelKBytes >> 4) + (step % 4) * 2);
      if (step < C::kQSteps) {
        if (step == 0) {
          ptx::wgmma_dense_first<C::kType>(scores, q[step], b);
        } else {
          ptx::wgmma_dense<C::kType>(scores, q[step], b);
        }
      } else {
        const std::uint32_t low = q_low + static_cast<std::uint32_t>(number % C::kQBuffers) * (C::kTileQBytes >> 4);
        const std::uint64_t a =
            ptx::descriptor(low + (step / 4 - C::kQPanelsByRing) * (C::kPanelQBytes >> 4) + (step % 4) * 2);
        if (step == 0) {
          ptx::wgmma_dense_first<C::kType>(scores, a, b);
        } else {
          ptx::wgmma_dense<C::kType>(scores, a, b);
        }
      }
    }
  }

  // The low word of the descriptor of V's tile in `stage`.
  __device__ __forceinline__ std::uint32_t values(int stage) const {
    return v_low + static_cast<std::uint32_t>(stage) * (C::kTileKBytes >> 4);
  }

  // The output of the tile in `stage`, added to that of the tiles before it.
  __device__ __forceinline__ void issue_output(int stage, int accumulate) {
    const std::uint32_t v = values(stage);
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const std::uint64_t b = ptx::descriptor(v + step * (32 * 128 >> 4));
      const std::uint32_t* a = weights + 4 * step;
      if (step % 2 == 0) {
        ptx::wgmma_sparse<C::kType, 0>(out, a[0], a[1], a[2], a[3], b, metadata[step / 2], step > 0 ? 1 : accumulate);
      } else {
        ptx::wgmma_sparse<C::kType, 1>(out, a[0], a[1], a[2], a[3], b, metadata[step / 2], 1);
      }
    }
  }

  // The weights and metadata a product will read are computed before its fence, not sunk below it.
  __device__ __forceinline__ void pin_weights() {
#pragma unroll
    for (int i = 0; i < C::kTileK / 8; ++i) ptx::pin(weights[i]);
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) ptx::pin(metadata[i]);
  }
};

}  // namespace dspattn::cuda::blocks
