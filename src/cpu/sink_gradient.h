// The gradient of the sinks: of head h the sum of P_sink * (dLSE - dO.O) over its rows, P_sink = exp(sink - LSE).
#pragma once

#include "dspattn/attention.h"

namespace dspattn::cpu {

// Writes args.d_sinks, which must be present.
void sink_gradient(const BackwardArgs& args);

}  // namespace dspattn::cpu
