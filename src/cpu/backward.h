// The fast CPU attention, backward. Serves every problem of the contract; see backward.cpp for how.
#pragma once

#include "dspattn/attention.h"

namespace dspattn::cpu {

void fast_backward(const BackwardArgs& args);

}  // namespace dspattn::cpu
