// The GPU rows in order of preference: kernels that are made for one architecture before the pipeline that runs on all.
#include "cuda/rows.h"

#include <vector>

#include "cuda/pipeline/pipeline.h"
#include "cuda/sm90/backward/rows.h"
#include "cuda/sm90/forward/rows.h"
#include "cuda/sm90/forward_tf32/rows.h"

namespace dspattn::cuda {

std::span<const core::KernelRow> rows() {
  static const std::vector<core::KernelRow> joined = [] {
    std::vector<core::KernelRow> all;
    for (const core::KernelRow& row : sm90::fused_rows()) all.push_back(row);
    for (const core::KernelRow& row : sm90::fused_tf32_rows()) all.push_back(row);
    for (const core::KernelRow& row : sm90::fused_backward_rows()) all.push_back(row);
    for (const core::KernelRow& row : pipeline::pipeline_rows()) all.push_back(row);
    return all;
  }();
  return joined;
}

}  // namespace dspattn::cuda
