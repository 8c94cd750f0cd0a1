// The library's forward with nothing but some instances of the fused kernel: `python3 -m bench.variants` links it in
// place of the library, behind the C interface of bench/common/shim.h. Arguments are not validated.
#include <string>
#include <utility>
#include <vector>

#include "cuda/sm90/forward/forward.h"
#include "cuda/sm90/forward/instance.h"
#include "cuda/tile/head_dims.h"
#include "dspattn/attention.h"
#include "dspattn/error.h"

namespace dspattn {
namespace {

using cuda::sm90::ForwardKernel;
using cuda::sm90::FusedRow;
using cuda::sm90::Launcher;
using cuda::sm90::launcher;
using cuda::sm90::Selection;
using cuda::sm90::Variant;

struct Compiled {
  ForwardKernel kernel;
  Launcher (*launcher)(Variant);
  Launcher (*general_launcher)(Variant);

  FusedRow row() const {
    return {kernel.type, cuda::blocks::pattern_of(kernel.selection), kernel.dim,
            cuda::tile::head_dim_below(kernel.dim)};
  }
};

// Without it a problem that needs the general variant would silently not be computed.
Launcher left_out(Variant) { throw Error("the general variant, which this problem needs, is not part of this build"); }

template <DType kType, Selection kSelection, int kDim>
Compiled row() {
  return {{kType, kSelection, kDim}, &launcher<kType, kSelection, kDim>, &left_out};
}

std::vector<Compiled> compiled_rows() {
  std::vector<Compiled> rows = {
#include "variant_rows.inc"  // row<DType::bf16, Selection::two_of_four, 64>(), ...: written by build.py
  };
  for (Compiled& row : rows) {
    for (const Compiled& other : rows) {
      if (other.kernel.type == row.kernel.type && other.kernel.selection == row.kernel.selection &&
          other.kernel.dim == cuda::sm90::general_dim(row.kernel.dim) && other.launcher(Variant::general) != nullptr) {
        row.general_launcher = other.launcher;
      }
    }
  }
  return rows;
}

// Its kernels are not built. Of versions that have no such setting it is none.
template <typename AnyProblem>
void refuse_mean(const AnyProblem& problem) {
  if constexpr (requires { problem.rest; }) {
    if (problem.rest != decltype(problem.rest){}) throw Error("rest: takes drop, got mean");
  }
}

const Compiled& row_for(const Problem& problem) {
  static const std::vector<Compiled> rows = compiled_rows();
  std::vector<std::string> reasons;  // of the row that has the fewest
  for (const Compiled& row : rows) {
    core::Refusals why_not(core::Refusals::Text::wanted);
    cuda::sm90::fused_why_not(row.row(), problem, why_not);
    if (!why_not.any()) return row;
    if (reasons.empty() || why_not.reasons().size() < reasons.size()) reasons = why_not.reasons();
  }
  throw Error(std::move(reasons));
}

}  // namespace

void forward(const ForwardArgs& args) {
  refuse_mean(args.problem);
  const Compiled& row = row_for(args.problem);
  cuda::sm90::fused_forward_launch(row.kernel, row.launcher, row.general_launcher, args);
}

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
