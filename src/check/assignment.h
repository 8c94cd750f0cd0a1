// Which kernels run a case, and what of it they cannot be asked for.
#pragma once

#include <string>
#include <vector>

#include "check/case.h"
#include "dspattn/kernels.h"

namespace dspattn::check {

bool has_kernel(Pass pass, const std::string& name);

// A case without what the kernel does not serve beyond the plain contract: that is checked where it is served, and the
// rest of the case is a problem that the kernel has to solve.
Case restricted(Case drawn, const std::string& kernel, DeviceType device);

// Which kernels run a case, or why none does.
struct Assignment {
  std::vector<std::string> reasons;
  std::string kernel;
  std::string forward_kernel;  // of a backward case: who makes its output; empty: the library's choice
};

Assignment assign(const Case& drawn, const std::string& kernel, Device device);

}  // namespace dspattn::check
