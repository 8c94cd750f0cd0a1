// RMS norm and rotary embedding of queries and keys, on a GPU (dspattn/norm_rope.h).
#pragma once

#include "dspattn/norm_rope.h"

namespace dspattn::cuda {

// Of arguments that have been checked. Throws in a build without CUDA.
void norm_rope(const NormRopeArgs& args);

}  // namespace dspattn::cuda
