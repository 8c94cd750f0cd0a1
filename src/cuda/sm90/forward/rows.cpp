// The 16-bit forward's rows of the kernel table, one per (type, pattern, head dim).
#include "cuda/sm90/forward/rows.h"

#include <vector>

#include "cuda/sm90/forward/forward.h"
#include "cuda/sm90/forward/instance.h"
#include "cuda/tile/head_dims.h"

namespace dspattn::cuda::sm90 {
namespace {

template <DType kType, Selection kSelection, int kDim>
struct Fused {
  static constexpr Pattern kPattern = pattern_of(kSelection);
  static constexpr FusedRow kRow{kType, kPattern, kDim, tile::head_dim_below(kDim)};
  static constexpr ForwardKernel kKernel{kType, kSelection, kDim};

  static core::KernelRow row() {
    static const std::string name = row_name(kRow);
    static const std::string summary = "Hopper, sparse tensor cores, " + std::string(dspattn::name(kType)) + ", " +
                                       to_string(kPattern) + ", head dims up to " + std::to_string(kDim) +
                                       ", every mask, packed batches";
    core::KernelRow result;
    result.info = {name, Pass::forward, DeviceType::cuda, summary};
    result.takes = key_of(kRow);
    result.why_not = [](const Problem& problem, core::Refusals& refusals) { fused_why_not(kRow, problem, refusals); };
    result.plan = [](const Problem& problem) { return describe_plan(kKernel, problem); };
    result.forward_workspace = &fused_workspace;
    result.forward = [](const ForwardArgs& args) {
      fused_forward_launch(kKernel, &launcher<kType, kSelection, kDim>, &launcher<kType, kSelection, general_dim(kDim)>,
                           args,
                           {&mean_launcher<kType, kSelection, mean_dim(kDim)>,
                            &mean_launcher<kType, kSelection, mean_general_dim(kDim)>});
    };
    result.features = {core::Feature::fp32_results, core::Feature::rest_mean};
    return result;
  }
};

template <DType kType, Selection kSelection>
void append(std::vector<core::KernelRow>& rows) {
  tile::for_each_head_dim([&]<int kDim> { rows.push_back(Fused<kType, kSelection, kDim>::row()); });
}

}  // namespace

std::span<const core::KernelRow> fused_rows() {
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
