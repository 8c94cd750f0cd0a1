// The head dims that the fused kernels are compiled for; others are filled up with zeros to the next. CMake and the
// tools read the list from here.
#pragma once

#include <cstddef>
#include <iterator>
#include <utility>

namespace dspattn::cuda::tile {

inline constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256};

// The largest head dim that the next smaller kernel takes.
constexpr int head_dim_below(int dim) {
  int below = 0;
  for (const int other : kHeadDims) below = other < dim && other > below ? other : below;
  return below;
}

// visit.operator()<dim>() for the one of them that `dim` is; a default value for any other.
template <typename Visit>
auto at_head_dim(int dim, Visit visit) {
  decltype(visit.template operator()<kHeadDims[0]>()) result{};
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    ((kHeadDims[kIndex] == dim ? static_cast<void>(result = visit.template operator()<kHeadDims[kIndex]>())
                               : static_cast<void>(0)),
     ...);
  }
  (std::make_index_sequence<std::size(kHeadDims)>{});
  return result;
}

}  // namespace dspattn::cuda::tile
