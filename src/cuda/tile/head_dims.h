// The head dims that kernels are compiled for; others are filled up with zeros to the next. Rows, tests, CMake and the
// tools read the lists from here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

namespace dspattn::cuda::tile {

// Of the fused forward, 16-bit and tf32.
inline constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256};
// Of its general variant, and of all its variants with rest = mean.
inline constexpr int kGeneralHeadDims[] = {64, 128, 256};
// Of the general variant with rest = mean.
inline constexpr int kMeanGeneralHeadDims[] = {128, 256};
// Of the fused backward.
inline constexpr int kBackwardHeadDims[] = {64, 128, 192, 256};
// Of the kernels for few queries, with 16-bit and with fp32 inputs.
inline constexpr int kDecodeHeadDims16[] = {64, 128, 256};
inline constexpr int kDecodeHeadDims32[] = {64, 128};

// The largest head dim that the next smaller kernel takes.
template <std::size_t kCount>
constexpr int head_dim_below(const int (&dims)[kCount], int dim) {
  int below = 0;
  for (const int other : dims) below = other < dim && other > below ? other : below;
  return below;
}
constexpr int head_dim_below(int dim) { return head_dim_below(kHeadDims, dim); }

// That of the smallest kernel that takes `dim`; 0: none does.
template <std::size_t kCount>
constexpr int head_dim_from(const int (&dims)[kCount], std::int64_t dim) {
  int from = 0;
  for (const int other : dims) from = other >= dim && (from == 0 || other < from) ? other : from;
  return from;
}

// visit.operator()<dim>() for the one of them that `dim` is; a default value for any other.
template <const auto& kDims = kHeadDims, typename Visit>
auto at_head_dim(int dim, Visit visit) {
  decltype(visit.template operator()<kDims[0]>()) result{};
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    ((kDims[kIndex] == dim ? static_cast<void>(result = visit.template operator()<kDims[kIndex]>())
                           : static_cast<void>(0)),
     ...);
  }
  (std::make_index_sequence<std::size(kDims)>{});
  return result;
}

// visit.operator()<dim>() for all of them, in their order.
template <const auto& kDims = kHeadDims, typename Visit>
void for_each_head_dim(Visit visit) {
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) { (visit.template operator()<kDims[kIndex]>(), ...); }
  (std::make_index_sequence<std::size(kDims)>{});
}

}  // namespace dspattn::cuda::tile
