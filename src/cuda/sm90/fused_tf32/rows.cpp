// The fused tf32 forward's rows of the kernel table, one per head dim.
#include "cuda/sm90/fused_tf32/rows.h"

#include <string>
#include <vector>

#include "cuda/sm90/fused_tf32/forward.h"
#include "cuda/sm90/fused_tf32/launch.h"

namespace dspattn::cuda::sm90 {
namespace {

template <int kDim, int kDimAbove>
struct FusedTf32 {
  static constexpr FusedRow kRow{DType::f32, Pattern{1, 2},         kDim,
                                 kDimAbove,  &tf32::launcher<kDim>, &tf32::launcher<tf32::general_dim(kDim)>};

  static void why_not(const Problem& problem, core::Refusals& refusals) { tf32::why_not(kRow, problem, refusals); }
  static std::size_t workspace(const ForwardArgs&) { return 0; }
  static void forward(const ForwardArgs& args) { tf32::forward_launch(kRow, args); }

  static core::KernelRow row() {
    static const std::string row_name = "sm90_fused_1_2_fp32_d" + std::to_string(kDim);
    static const std::string summary = "Hopper, sparse tensor cores, fp32 in tf32 products, 1:2, head dims up to " +
                                       std::to_string(kDim) + ", every mask, packed batches";
    core::KernelRow result;
    result.info = {row_name, Pass::forward, DeviceType::cuda, summary};
    result.why_not = &why_not;
    result.forward_workspace = &workspace;
    result.forward = &forward;
    return result;
  }
};

}  // namespace

std::span<const core::KernelRow> fused_tf32_rows() {
  static const std::vector<core::KernelRow> table{FusedTf32<32, 0>::row(),    FusedTf32<64, 32>::row(),
                                                  FusedTf32<96, 64>::row(),   FusedTf32<128, 96>::row(),
                                                  FusedTf32<192, 128>::row(), FusedTf32<256, 192>::row()};
  return table;
}

}  // namespace dspattn::cuda::sm90
