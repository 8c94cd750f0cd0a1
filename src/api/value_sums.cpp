// validate -> run on the tensors' device.
#include "dspattn/value_sums.h"

#include <utility>

#include "core/value_sums_check.h"
#include "cpu/value_sums.h"
#include "cuda/value_sums.h"

namespace dspattn {

void update_value_sums(const ValueSumsArgs& args) {
  if (std::vector<std::string> reasons = core::value_sums_reasons(args); !reasons.empty()) {
    throw Error(std::move(reasons));
  }
  args.device.type == DeviceType::cpu ? cpu::update_value_sums(args) : cuda::update_value_sums(args);
}

}  // namespace dspattn
