// From a problem to the parts of a kernel's parameters: what the host sides of all fused kernels share.
#pragma once

#include "core/geometry.h"
#include "cuda/blocks/pages.h"
#include "cuda/blocks/prepare_params.h"
#include "cuda/blocks/scales.h"
#include "cuda/blocks/views.h"
#include "cuda/blocks/work_params.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::blocks {

tile::LengthsView lengths_of(const ConstTensorView& tensor);
RowsView rows_of(const ConstTensorView& tensor);
OutView out_of(const TensorView& out);
LseView lse_of(const TensorView& lse);
MaskTensor mask_of(const ConstTensorView& tensor);
Pages pages_of(const Problem& problem);

// Rows can be copied 16 bytes at a time.
bool is_vector(const ConstTensorView& tensor);

// Nothing to compute: no launch.
bool is_empty(const core::Geometry& geometry);

// Whether the diagonal matters.
bool is_banded(const Mask& mask);

ScoreScales scales_of(DType type, double scale, bool has_bias);

// All but the order of items.
WorkParams work_of(const Problem& problem);

// Rows of a packed output that no sequence has; no table.
PrepareParams packed_rows(const ForwardArgs& args);

}  // namespace dspattn::cuda::blocks
