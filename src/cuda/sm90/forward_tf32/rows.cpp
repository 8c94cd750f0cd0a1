// The tf32 forward's rows of the kernel table, one per head dim.
#include "cuda/sm90/forward_tf32/rows.h"

#include <vector>

#include "cuda/device/device.h"
#include "cuda/sm90/forward_tf32/forward.h"
#include "cuda/sm90/forward_tf32/instance.h"
#include "cuda/sm90/forward_tf32/plan.h"
#include "cuda/tile/head_dims.h"

namespace dspattn::cuda::sm90 {
namespace {

template <int kDim>
core::KernelRow tf32_row() {
  static constexpr FusedRow kRow{DType::f32, Pattern{1, 2}, kDim, tile::head_dim_below(kDim)};
  static const std::string name = row_name(kRow);
  static const std::string summary = "Hopper, sparse tensor cores, fp32 in tf32 products, 1:2, head dims up to " +
                                     std::to_string(kDim) + ", every mask, packed batches";
  return {
      .info = {name, Pass::forward, DeviceType::cuda, summary},
      .takes = key_of(kRow),
      .why_not = [](const Problem& problem, core::Refusals& refusals) { tf32::why_not(kRow, problem, refusals); },
      .yields = [](const Problem& problem) { return tf32::yields(kDim, problem, device_facts(problem.device.index)); },
      .plan = [](const Problem& problem) { return tf32::describe_plan(kDim, problem); },
      .forward_workspace = [](const ForwardArgs&) { return std::size_t{0}; },
      .forward =
          [](const ForwardArgs& args) {
            tf32::forward_launch(kDim, &tf32::launcher<kDim>, &tf32::launcher<general_dim(kDim)>, args);
          },
      .features = {core::Feature::fp32_results}};  // all of them are
}

}  // namespace

std::span<const core::KernelRow> fused_tf32_rows() {
  static const std::vector<core::KernelRow> table = [] {
    std::vector<core::KernelRow> rows;
    tile::for_each_head_dim([&]<int kDim> { rows.push_back(tf32_row<kDim>()); });
    return rows;
  }();
  return table;
}

}  // namespace dspattn::cuda::sm90
