// Rows of a packed batch past its last sequence. They belong to no sequence and see no key, so their results are those
// of any row without keys: 0, an LSE of -inf, gradients of 0.
#pragma once

#include "dspattn/attention.h"

namespace dspattn::cpu {

void finish_tail(const ForwardArgs& args);
void finish_tail(const BackwardArgs& args);

}  // namespace dspattn::cpu
