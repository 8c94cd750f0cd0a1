// Mask tensors, part of a kernel's parameters.
#pragma once

#include <cuda.h>

#include "cuda/blocks/views.h"

namespace dspattn::cuda::blocks {

struct MaskParams {
  CUtensorMap allowed_map, bias_map;  // (key, row, head, batch)
  MaskTensor allowed;                 // bytes, zero = masked
  MaskTensor bias;
  int bias_bytes = 0;  // of an element: 4 (fp32), or 2 (the inputs' type)
  int bytes = 0;       // of an element of the larger of both; 0: there is none
  int by_tma = 0;      // TMA can read all there are
};

}  // namespace dspattn::cuda::blocks
