// The head dims that the fused kernels are compiled for; others are filled up with zeros to the next. CMake and the
// tools read the list from here.
#pragma once

namespace dspattn::cuda::tile {

inline constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256};

// The largest head dim that the next smaller kernel takes.
constexpr int head_dim_below(int dim) {
  int below = 0;
  for (const int other : kHeadDims) below = other < dim && other > below ? other : below;
  return below;
}

}  // namespace dspattn::cuda::tile
