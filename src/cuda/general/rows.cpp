#include "cuda/general/rows.h"

#include <string>
#include <vector>

#include "cuda/general/backward/backward.h"
#include "cuda/general/forward.h"

namespace dspattn::cuda::general {
namespace {

template <DType kType>
core::KernelRow forward_row() {
  static const std::string name = "general_" + std::string(dspattn::name(kType));
  static const std::string summary =
      "any card since Ampere (timed on an H200), " + std::string(dspattn::name(kType)) +
      ", every pattern and mask, d up to 512, packed batches, pages, soft caps, dropout, means, shared choices";
  core::KernelRow row;
  row.info = {name, Pass::forward, DeviceType::cuda, summary};
  row.takes.dtype = kType;
  row.why_not = [](const Problem& problem, core::Refusals& refusals) { why_not(kType, problem, refusals); };
  row.plan = &describe_plan;
  row.forward_workspace = &forward_workspace;
  row.forward = &forward_launch;
  row.features = {core::Feature::fp32_results, core::Feature::rest_mean, core::Feature::shared_choice,
                  core::Feature::dropout,      core::Feature::soft_cap,  core::Feature::sinks,
                  core::Feature::paged};
  return row;
}

// Of the same name as the forward, whose selection it repeats bit for bit.
template <DType kType>
core::KernelRow backward_row() {
  core::KernelRow row;
  const core::KernelRow forward = forward_row<kType>();
  static const std::string summary = "any card since Ampere, " + std::string(dspattn::name(kType)) +
                                     ", every pattern, every mask, packed batches, d up to 512";
  row.info = {forward.info.name, Pass::backward, DeviceType::cuda, summary};
  row.takes.dtype = kType;
  row.why_not = [](const Problem& problem, core::Refusals& refusals) {
    why_not(kType, problem, refusals);
    backward::size_why_not(problem, refusals);
  };
  row.plan = &backward::describe_plan;
  row.backward_workspace = &backward::workspace_bytes;
  row.backward = &backward::backward_launch;
  row.features = {core::Feature::fp32_results, core::Feature::dropout, core::Feature::soft_cap, core::Feature::sinks,
                  core::Feature::d_lse,        core::Feature::d_bias,  core::Feature::d_sinks};
  return row;
}

}  // namespace

std::span<const core::KernelRow> general_rows() {
  static const std::vector<core::KernelRow> table{forward_row<DType::bf16>(), forward_row<DType::f16>(),
                                                  forward_row<DType::f32>(),  backward_row<DType::bf16>(),
                                                  backward_row<DType::f16>(), backward_row<DType::f32>()};
  return table;
}

}  // namespace dspattn::cuda::general
