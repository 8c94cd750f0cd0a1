// Sums of V over blocks of keys, on the CPU (dspattn/value_sums.h).
#pragma once

#include "dspattn/value_sums.h"

namespace dspattn::cpu {

// Of arguments that have been checked.
void update_value_sums(const ValueSumsArgs& args);

}  // namespace dspattn::cpu
