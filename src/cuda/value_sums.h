// Sums of V over blocks of keys, on a GPU (dspattn/value_sums.h).
#pragma once

#include "dspattn/value_sums.h"

namespace dspattn::cuda {

// Of arguments that have been checked. Throws in a build without CUDA.
void update_value_sums(const ValueSumsArgs& args);

}  // namespace dspattn::cuda
