// What every compiled instance of the general backward needs.
#pragma once

#include <cuda_runtime.h>

#include "cuda/general/backward/config.h"
#include "cuda/general/backward/params.h"

namespace dspattn::cuda::general::backward {

struct LaunchArgs {
  unsigned ctas = 0;
  int threads = 0;
  int shared_bytes = 0;
};

using Launcher = void (*)(const BackwardParams& params, const LaunchArgs& args, cudaStream_t stream);

struct Launchers {
  Launcher queries = nullptr;
  Launcher keys = nullptr;
  Launcher plain_keys = nullptr;  // Features::plain
};

// Of a compiled head dim; what is not compiled for it is null. One definition per translation unit of instances
// (instance.cu.in).
template <DType kType, Kind kKind>
Launchers launchers(int dim);

}  // namespace dspattn::cuda::general::backward
