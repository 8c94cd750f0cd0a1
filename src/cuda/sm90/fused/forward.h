// Host side of the fused forward: which problems it serves, and its launch.
#pragma once

#include "core/geometry.h"
#include "core/kernel_row.h"
#include "cuda/sm90/fused/launch.h"
#include "cuda/sm90/fused/tensor_maps.h"

namespace dspattn::cuda::sm90 {

// One row of the kernel table.
struct FusedRow {
  DType type;
  Pattern pattern;
  int dim;        // largest head dim it takes
  int dim_above;  // and those above this
  Launcher (*launcher)(Variant variant);
  Launcher (*general_launcher)(Variant variant);  // of the head dim that has the general variant
};

// Everything that depends neither on the variant nor on the tile sizes.
FusedParams params_of(const ForwardArgs& args, const core::Geometry& geometry);
Extents extents_of(const ConstTensorView& tensor);
// Only the general variant can serve them: mask tensors, tensors that the copy engine or 16-byte accesses cannot reach.
bool needs_general(const FusedParams& params);
// How `blocks` thread blocks walk tiles of tile_q query rows.
tile::ItemOrder order_of(const FusedParams& params, const Problem& problem, const core::Geometry& geometry, int tile_q,
                         int blocks);

void fused_why_not(const FusedRow& row, const Problem& problem, core::Refusals& refusals);

// For sequences of different lengths: the order in which their items are taken.
std::size_t fused_workspace(const ForwardArgs& args);

// Enqueues on the caller's stream; nothing is allocated or waited for.
void fused_forward_launch(const FusedRow& row, const ForwardArgs& args);

}  // namespace dspattn::cuda::sm90
