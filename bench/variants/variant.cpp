// The library's forward with nothing but some instances of the fused kernel: `python3 -m bench.variants` links it in
// place of the library, behind the C interface of bench/common/shim.h. Arguments are not validated.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "cuda/sm90/forward/forward.h"
#include "dspattn/attention.h"
#include "dspattn/error.h"

namespace dspattn {
namespace {

using cuda::sm90::FusedRow;
using cuda::sm90::Launcher;
using cuda::sm90::launcher;
using cuda::sm90::Selection;
using cuda::sm90::Variant;

// Without it a problem that needs the general variant would silently not be computed.
Launcher left_out(Variant) { throw Error("the general variant, which this problem needs, is not part of this build"); }

template <DType kType, Selection kSelection, int kDim>
FusedRow row() {
  const int* next = std::find(std::begin(cuda::sm90::kHeadDims), std::end(cuda::sm90::kHeadDims), kDim);
  FusedRow result{};
  result.type = kType;
  result.pattern = kSelection == Selection::two_of_four ? Pattern{2, 4} : Pattern{1, 2};
  result.dim = kDim;
  result.dim_above = next == std::begin(cuda::sm90::kHeadDims) ? 0 : *(next - 1);
  result.launcher = &launcher<kType, kSelection, kDim>;
  result.general_launcher = &left_out;
  return result;
}

std::vector<FusedRow> compiled_rows() {
  std::vector<FusedRow> rows = {
#include "variant_rows.inc"  // row<DType::bf16, Selection::two_of_four, 64>(), ...: written by build.py
  };
  for (FusedRow& row : rows) {
    for (const FusedRow& other : rows) {
      if (other.type == row.type && other.pattern == row.pattern && other.dim == cuda::sm90::general_dim(row.dim) &&
          other.launcher(Variant::general).launch != nullptr) {
        row.general_launcher = other.launcher;
      }
    }
  }
  return rows;
}

const FusedRow& row_for(const Problem& problem) {
  static const std::vector<FusedRow> rows = compiled_rows();
  std::vector<std::string> reasons;  // of the row that has the fewest
  for (const FusedRow& row : rows) {
    core::Refusals why_not(core::Refusals::Text::wanted);
    cuda::sm90::fused_why_not(row, problem, why_not);
    if (!why_not.any()) return row;
    if (reasons.empty() || why_not.reasons().size() < reasons.size()) reasons = why_not.reasons();
  }
  throw Error(std::move(reasons));
}

}  // namespace

void forward(const ForwardArgs& args) { cuda::sm90::fused_forward_launch(row_for(args.problem), args); }

std::size_t forward_workspace_bytes(const ForwardArgs& args) {
  row_for(args.problem);
  return cuda::sm90::fused_workspace(args);
}

}  // namespace dspattn

// What was built, and from what, as JSON: a build says it wherever it is carried.
extern "C" const char* dspattn_bench_build() {
  return
#include "variant_build.inc"
      ;
}
