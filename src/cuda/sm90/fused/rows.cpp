// The fused forward's rows of the kernel table, one per (type, pattern, head dim).
#include "cuda/sm90/fused/rows.h"

#include <string>
#include <vector>

#include "cuda/sm90/fused/forward.h"

namespace dspattn::cuda::sm90 {
namespace {

template <DType kType, Selection kSelection, int kDim, int kDimAbove>
struct Fused {
  static constexpr Pattern kPattern = kSelection == Selection::two_of_four ? Pattern{2, 4} : Pattern{1, 2};
  static constexpr FusedRow kRow{kType,
                                 kPattern,
                                 kDim,
                                 kDimAbove,
                                 &launcher<kType, kSelection, kDim>,
                                 &launcher<kType, kSelection, general_dim(kDim)>};

  static void why_not(const Problem& problem, core::Refusals& refusals) { fused_why_not(kRow, problem, refusals); }
  static std::size_t workspace(const ForwardArgs& args) { return fused_workspace(args); }
  static void forward(const ForwardArgs& args) { fused_forward_launch(kRow, args); }

  static core::KernelRow row() {
    static const std::string row_name = "sm90_fused_" + std::to_string(kPattern.keep) + "_" +
                                        std::to_string(kPattern.group) + "_" + std::string(name(kType)) + "_d" +
                                        std::to_string(kDim);
    static const std::string summary = "Hopper, sparse tensor cores, " + std::string(name(kType)) + ", " +
                                       to_string(kPattern) + ", head dims up to " + std::to_string(kDim) +
                                       ", every mask, packed batches";
    core::KernelRow result;
    result.info = {row_name, Pass::forward, DeviceType::cuda, summary};
    result.why_not = &why_not;
    result.forward_workspace = &workspace;
    result.forward = &forward;
    return result;
  }
};

template <DType kType, Selection kSelection>
void append(std::vector<core::KernelRow>& rows) {
  rows.push_back(Fused<kType, kSelection, 32, 0>::row());
  rows.push_back(Fused<kType, kSelection, 64, 32>::row());
  rows.push_back(Fused<kType, kSelection, 96, 64>::row());
  rows.push_back(Fused<kType, kSelection, 128, 96>::row());
  rows.push_back(Fused<kType, kSelection, 192, 128>::row());
  rows.push_back(Fused<kType, kSelection, 256, 192>::row());
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
