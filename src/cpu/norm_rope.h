// RMS norm and rotary embedding of queries and keys, on the CPU (dspattn/norm_rope.h).
#pragma once

#include "dspattn/norm_rope.h"

namespace dspattn::cpu {

// Of arguments that have been checked.
void norm_rope(const NormRopeArgs& args);

}  // namespace dspattn::cpu
