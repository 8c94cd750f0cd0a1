// Checks of a call of norm_rope. Returns all reasons; none reads device memory.
#pragma once

#include <string>
#include <vector>

#include "dspattn/norm_rope.h"

namespace dspattn::core {

std::vector<std::string> norm_rope_reasons(const NormRopeArgs& args);

}  // namespace dspattn::core
