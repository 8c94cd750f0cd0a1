// Plans of the fused forward kernels: pure functions of the problem and the device (plan_forward of each kernel's
// folder), printed by `dspattn kernels`. Launching only fills parameters from a plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/geometry.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/blocks/tma_shapes.h"
#include "cuda/device/facts.h"
#include "cuda/sm90/common/forward_plan.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::sm90 {

// What a kernel's Config says of a variant.
template <typename C>
VariantTraits traits_from() {
  return {.compiled = true,
          .dim = C::kHeadDim,
          .tile_q = C::kTileQ,
          .tile_k = C::kTileK,
          .consumers = C::kConsumers,
          .stages = C::kStages,
          .may_pair = C::kPairs,
          .may_descend = C::kMayDescend,
          .spares_stage = C::kSparesStage,
          .writes_means = [] {
            if constexpr (requires { C::kWritesMeans; }) return C::kWritesMeans;
            return false;
          }()};
}

std::string to_string(const ForwardPlan& plan);

// What plans of all fused forward kernels ask of a problem.
struct ForwardQuestion {
  const Problem& problem;
  TensorView out;  // the output; where it is not known yet, a contiguous one
  core::Geometry geometry;
  core::Band band;
  bool full = false;       // every row sees all keys of its sequence
  bool scheduled = false;  // sequences whose lengths only the device knows

  ForwardQuestion(const Problem& p, const TensorView& o);
  // Query rows of a sequence; of a packed batch, the mean.
  std::int64_t mean_rows() const;
  std::int64_t sequence_heads() const { return geometry.batch * geometry.heads; }
};

using blocks::contiguous_out;
using blocks::is_vector;
using blocks::mask_of;
using blocks::rows_of;
blocks::Extents extents_of(const ConstTensorView& tensor);
// Extents of a mask tensor of the whole problem.
blocks::Extents mask_extents(const core::Geometry& geometry);

// Fills in vector_*, and whether TMA can address Q, the output and the mask tensors; K and V are the kernel's own.
void look_at_tensors(const ForwardQuestion& question, ForwardPlan& plan);

// Only the general variant can serve them: mask tensors, tensors that TMA or 16-byte accesses cannot reach. Empty: any
// can.
std::string needs_general(const ForwardQuestion& question, const ForwardPlan& plan);

// Causal masks and windows of up to this many row tiles a head, at d > 64: all of a head's row tiles at once.
inline constexpr int kMirroredRowTiles = 8;

// How `workers` CTAs, or pairs of them, walk tiles of tile_q query rows.
void choose_order(const ForwardQuestion& question, int tile_q, int workers, ForwardPlan& plan);

}  // namespace dspattn::cuda::sm90
