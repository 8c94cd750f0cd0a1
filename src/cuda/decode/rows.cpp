// The split-key kernels' rows of the kernel table, one per (type, head dim).
#include "cuda/decode/rows.h"

#include <vector>

#include "cuda/decode/decode.h"
#include "cuda/decode/launch.h"
#include "cuda/decode/plan.h"
#include "cuda/device/device.h"
#include "cuda/tile/head_dims.h"

namespace dspattn::cuda::decode {
namespace {

template <DType kType, int kDim, int kDimAbove>
core::KernelRow row() {
  static constexpr DecodeRow kRow{kType, kDim, kDimAbove};
  static const std::string name = row_name(kRow);
  static const std::string summary = "few queries, keys split over CTAs, " + std::string(dspattn::name(kType)) +
                                     ", 2:4 and 1:2, head dims up to " + std::to_string(kDim) + ", up to " +
                                     std::to_string(kMostRows) + " query rows a key head, every mask, sm_80 and later";
  core::KernelRow result;
  result.info = {name, Pass::forward, DeviceType::cuda, summary};
  result.takes = {.dtype = kType, .pattern = {}, .dim_above = kDimAbove, .dim = kDim};
  result.why_not = [](const Problem& problem, core::Refusals& refusals) { why_not(kRow, problem, refusals); };
  result.yields = [](const Problem& problem) { return yields(problem, device_facts(problem.device.index)); };
  result.plan = [](const Problem& problem) { return describe_plan(kRow, problem); };
  result.forward_workspace = [](const ForwardArgs& args) { return workspace(kRow, args); };
  result.forward = [](const ForwardArgs& args) { forward_launch(kRow, args); };
  result.features = {core::Feature::fp32_results, core::Feature::paged};
  if (sums_pruned(kDim)) result.features.add(core::Feature::rest_mean);
  if (chooses_together(kType, kDim)) result.features.add(core::Feature::shared_choice);
  return result;
}

template <DType kType, const auto& kDims>
void append(std::vector<core::KernelRow>& rows) {
  tile::for_each_head_dim<kDims>(
      [&]<int kDim> { rows.push_back(row<kType, kDim, tile::head_dim_below(kDims, kDim)>()); });
}

}  // namespace

std::span<const core::KernelRow> decode_rows() {
  static const std::vector<core::KernelRow> table = [] {
    std::vector<core::KernelRow> rows;
    append<DType::bf16, tile::kDecodeHeadDims16>(rows);
    append<DType::f16, tile::kDecodeHeadDims16>(rows);
    append<DType::f32, tile::kDecodeHeadDims32>(rows);
    return rows;
  }();
  return table;
}

}  // namespace dspattn::cuda::decode
