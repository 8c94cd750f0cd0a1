// How a plan becomes a launch: what every compiled instance of the general forward needs.
#pragma once

#include <cuda_runtime.h>

#include "cuda/general/config.h"
#include "cuda/general/params.h"

namespace dspattn::cuda::general {

struct LaunchArgs {
  unsigned ctas = 0;
  int threads = 0;
  int shared_bytes = 0;
};

using Launcher = void (*)(const ForwardParams& params, const LaunchArgs& args, cudaStream_t stream);

// Of a compiled head dim. One definition per translation unit of instances (instance.cu.in).
template <DType kType, Kind kKind, Scope kScope>
Launcher launcher(int dim);

}  // namespace dspattn::cuda::general
