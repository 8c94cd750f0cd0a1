// The split-key kernels' rows of the kernel table, one per (type, head dim).
#include "cuda/decode/rows.h"

#include <vector>

#include "cuda/decode/decode.h"
#include "cuda/decode/launch.h"
#include "cuda/decode/plan.h"
#include "cuda/device/device.h"

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

}  // namespace

std::span<const core::KernelRow> decode_rows() {
  static const std::vector<core::KernelRow> table = {row<DType::bf16, 64, 0>(),    row<DType::bf16, 128, 64>(),
                                                     row<DType::bf16, 256, 128>(), row<DType::f16, 64, 0>(),
                                                     row<DType::f16, 128, 64>(),   row<DType::f16, 256, 128>(),
                                                     row<DType::f32, 64, 0>(),     row<DType::f32, 128, 64>()};
  return table;
}

}  // namespace dspattn::cuda::decode
