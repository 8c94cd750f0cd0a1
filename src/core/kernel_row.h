// One line of the kernel table. A backend publishes its rows; src/api joins them. Adding a kernel is adding a row.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "dspattn/kernels.h"

namespace dspattn::core {

using Reasons = std::vector<std::string>;

struct KernelRow {
  KernelInfo info;
  // Every reason the kernel cannot serve a valid problem, each naming the argument, what the kernel takes and what was
  // given; empty when it can.
  Reasons (*why_not)(const Problem& problem) = nullptr;
  // Exactly one of each pair is set, according to info.pass. Called only with validated arguments and no reasons.
  std::size_t (*forward_workspace)(const ForwardArgs& args) = nullptr;
  void (*forward)(const ForwardArgs& args) = nullptr;
  std::size_t (*backward_workspace)(const BackwardArgs& args) = nullptr;
  void (*backward)(const BackwardArgs& args) = nullptr;
};

}  // namespace dspattn::core
