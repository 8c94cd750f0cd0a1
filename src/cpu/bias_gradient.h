// The gradient of a bias, as a pass of its own: dS, summed over what the bias is broadcast over.
#pragma once

#include "dspattn/attention.h"

namespace dspattn::cpu {

// Writes args.d_bias, which must be present.
void bias_gradient(const BackwardArgs& args);

}  // namespace dspattn::cpu
