// The fast CPU attention, forward. Serves every problem of the contract; see forward.cpp for how.
#pragma once

#include "dspattn/attention.h"

namespace dspattn::cpu {

void fast_forward(const ForwardArgs& args);

}  // namespace dspattn::cpu
