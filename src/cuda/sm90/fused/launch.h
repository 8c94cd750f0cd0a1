// The compiled kernels of the fused forward, by what they were compiled for.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/fused/config.h"
#include "cuda/sm90/fused/params.h"

namespace dspattn::cuda::sm90 {

inline constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256};

// Beyond this head dim three warpgroups' accumulators do not fit; below it nobody measured.
constexpr bool has_wide(int dim) { return dim == 64; }
// Where thread blocks can work in pairs.
constexpr bool has_full(int dim) { return dim == 96 || dim == 128; }
// The general variant is compiled for every other head dim only; smaller ones are filled up with zeros.
constexpr int general_dim(int dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

struct Launcher {
  int tile_q = 0;
  int tile_k = 0;
  cudaError_t (*launch)(const FusedParams& params, int blocks, cudaStream_t stream) = nullptr;  // null: not compiled
  bool pairs = false;  // of thread blocks are possible
};

// Defined in instance.cu.in, compiled once per (type, selection, head dim).
template <DType kType, Selection kSelection, int kDim>
Launcher launcher(Variant variant);

}  // namespace dspattn::cuda::sm90
