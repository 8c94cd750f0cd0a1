// From a problem to the parts of a kernel's parameters: what the host sides of all fused kernels share.
#pragma once

#include "core/geometry.h"
#include "cuda/blocks/pages.h"
#include "cuda/blocks/prepare_params.h"
#include "cuda/blocks/random_state.h"
#include "cuda/blocks/scales.h"
#include "cuda/blocks/value_sums_params.h"
#include "cuda/blocks/views.h"
#include "cuda/blocks/work_params.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::blocks {

tile::LengthsView lengths_of(const ConstTensorView& tensor);
RowsView rows_of(const ConstTensorView& tensor);
OutView out_of(const TensorView& out);
LseView lse_of(const TensorView& lse);
MaskTensor mask_of(const ConstTensorView& tensor);
// Of what is only read.
LseView read_lse_of(const ConstTensorView& lse);
// Of an element; 0: there is none.
int bias_bytes_of(const Mask& mask);
Pages pages_of(const Problem& problem);
RandomState random_state_of(const Dropout& dropout);
// `pages`: K or V.
Pages pages_of(const ConstTensorView& block_table, const ConstTensorView& pages);
SumsView sums_of(const TensorView& sums);
// Of what is only read.
SumsView read_sums_of(const ConstTensorView& sums);

// Rows can be copied 16 bytes at a time.
bool is_vector(const ConstTensorView& tensor);

// A stand-in for an output that nobody has given yet: contiguous and aligned as an allocation is, never read or
// written.
TensorView contiguous_out(const Problem& problem);

// Nothing to compute: no launch.
bool is_empty(const core::Geometry& geometry);

// Whether the diagonal matters.
bool is_banded(const Mask& mask);

ScoreScales scales_of(DType type, double scale, bool has_bias);

// All but the order of items.
WorkParams work_of(const Problem& problem);

// The tensors of a call, which every kernel's parameters name alike.
template <typename Params>
void set_tensors(Params& params, const ForwardArgs& args) {
  params.q = rows_of(args.problem.q);
  params.k = rows_of(args.problem.k);
  params.v = rows_of(args.problem.v);
  params.out = out_of(args.out);
  params.lse = lse_of(args.lse);
}
template <typename Params>
void set_tensors(Params& params, const BackwardArgs& args) {
  params.q = rows_of(args.problem.q);
  params.k = rows_of(args.problem.k);
  params.v = rows_of(args.problem.v);
  params.out = rows_of(args.out);
  params.d_out = rows_of(args.d_out);
  params.lse = read_lse_of(args.lse);
  params.d_lse = read_lse_of(args.d_lse);
  params.d_q = out_of(args.d_q);
  params.d_k = out_of(args.d_k);
  params.d_v = out_of(args.d_v);
  params.allowed = mask_of(args.problem.mask.allowed);
  params.bias = mask_of(args.problem.mask.bias);
}

// Rows of a packed output that no sequence has; no table.
PrepareParams packed_rows(const ForwardArgs& args);

}  // namespace dspattn::cuda::blocks
