// The fused backward's rows of the kernel table, one per (type, pattern, head dim).
#include "cuda/sm90/backward/rows.h"

#include <string>
#include <vector>

#include "cuda/sm90/backward/backward.h"
#include "cuda/sm90/backward/instance.h"
#include "cuda/sm90/common/forward.h"
#include "cuda/tile/head_dims.h"

namespace dspattn::cuda::sm90 {
namespace {

using backward::BackwardKernel;
using backward::Selection;

template <DType kType, Selection kSelection, int kDim>
void launch_kernel(const backward::BackwardParams& params, int ctas, cudaStream_t stream) {
  if constexpr (backward::has_bias_kernel(kDim)) {
    if (params.bias_copied != 0) return backward::launch_bias_instance<kType, kSelection, kDim>(params, ctas, stream);
  }
  backward::launch_instance<kType, kSelection, kDim>(params, ctas, stream);
}

template <DType kType, Selection kSelection, int kDim>
core::KernelRow backward_row() {
  static constexpr Pattern kPattern = pattern_of(kSelection);
  static constexpr FusedRow kRow{kType, kPattern, kDim, tile::head_dim_below(tile::kBackwardHeadDims, kDim)};
  static constexpr BackwardKernel kKernel{kType, kSelection, kDim};
  static const std::string name = row_name(kRow, "sm90_fused_backward_");
  static const std::string summary = "Hopper, tensor cores, " + std::string(dspattn::name(kType)) + ", " +
                                     to_string(kPattern) + ", head dims up to " + std::to_string(kDim) +
                                     ", every mask, packed batches";
  core::KernelRow result;
  result.info = {name, Pass::backward, DeviceType::cuda, summary};
  result.takes = key_of(kRow);
  result.why_not = [](const Problem& problem, core::Refusals& refusals) {
    fused_why_not(kRow, problem, refusals);
    backward::size_why_not(kKernel, problem, refusals);
  };
  result.plan = [](const Problem& problem) { return backward::describe_plan(kKernel, problem); };
  result.backward_workspace = [](const BackwardArgs& args) { return backward::fused_workspace(kKernel, args); };
  result.backward = [](const BackwardArgs& args) {
    backward::fused_backward_launch(kKernel, &launch_kernel<kType, kSelection, kDim>, args);
  };
  result.features = {core::Feature::d_lse};
  return result;
}

template <DType kType, Selection kSelection>
void append(std::vector<core::KernelRow>& rows) {
  tile::for_each_head_dim<tile::kBackwardHeadDims>(
      [&]<int kDim> { rows.push_back(backward_row<kType, kSelection, kDim>()); });
}

}  // namespace

std::span<const core::KernelRow> fused_backward_rows() {
  static const std::vector<core::KernelRow> table = [] {
    std::vector<core::KernelRow> rows;
    append<DType::bf16, Selection::two_of_four>(rows);
    append<DType::bf16, Selection::one_of_two>(rows);
    append<DType::f16, Selection::two_of_four>(rows);
    append<DType::f16, Selection::one_of_two>(rows);
    return rows;
  }();
  return table;
}

}  // namespace dspattn::cuda::sm90
