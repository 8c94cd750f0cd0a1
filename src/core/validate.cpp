#include "core/validate.h"

namespace dspattn::core {

std::vector<std::string> problem_reasons(const Problem&) { return {}; }
std::vector<std::string> forward_reasons(const ForwardArgs&) { return {}; }
std::vector<std::string> backward_reasons(const BackwardArgs&) { return {}; }

}  // namespace dspattn::core
