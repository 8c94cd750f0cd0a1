// Checks of everything that no kernel could make sense of. Each returns all reasons; none reads device memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dspattn/attention.h"

namespace dspattn::core {

// Of Execution::workspace: as cudaMalloc aligns; documented in attention.h.
inline constexpr std::uintptr_t kWorkspaceAlignment = 256;

// Shapes, strides, types, pattern, mask, scale, packed lengths of a problem.
std::vector<std::string> problem_reasons(const Problem& problem);

// Those of a problem that had none, whose lengths have been written to since.
std::vector<std::string> length_reasons(const Problem& problem);

// The problem's reasons and those of outputs (shape, type, null data, overlap with an input or another output) and of
// the execution (stream, threads, workspace alignment).
std::vector<std::string> forward_reasons(const ForwardArgs& args);
std::vector<std::string> backward_reasons(const BackwardArgs& args);

// One error with all of them.
void raise_if_any(std::vector<std::string> reasons);

}  // namespace dspattn::core
