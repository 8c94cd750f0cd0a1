// The GPU rows in order of preference: the kernel for few queries, which yields where there are many; kernels that are
// made for one architecture; the general one, which serves every valid problem on every card since Ampere. The pipeline
// is taken only by its name.
#include "cuda/rows.h"

#include <vector>

#include "cuda/decode/rows.h"
#include "cuda/general/rows.h"
#include "cuda/pipeline/pipeline.h"
#include "cuda/sm90/backward/rows.h"
#include "cuda/sm90/forward/rows.h"
#include "cuda/sm90/forward_tf32/rows.h"

namespace dspattn::cuda {

std::span<const core::KernelRow> rows() {
  static const std::vector<core::KernelRow> joined = [] {
    std::vector<core::KernelRow> all;
    for (const core::KernelRow& row : decode::decode_rows()) all.push_back(row);
    for (const core::KernelRow& row : sm90::fused_rows()) all.push_back(row);
    for (const core::KernelRow& row : sm90::fused_tf32_rows()) all.push_back(row);
    for (const core::KernelRow& row : sm90::fused_backward_rows()) all.push_back(row);
    for (const core::KernelRow& row : general::general_rows()) all.push_back(row);
    for (const core::KernelRow& row : pipeline::pipeline_rows()) all.push_back(row);
    return all;
  }();
  return joined;
}

}  // namespace dspattn::cuda
