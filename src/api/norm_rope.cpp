// validate -> run on the tensors' device.
#include "dspattn/norm_rope.h"

#include <utility>

#include "core/norm_rope_check.h"
#include "cpu/norm_rope.h"
#include "cuda/norm_rope/norm_rope.h"

namespace dspattn {

void norm_rope(const NormRopeArgs& args) {
  if (std::vector<std::string> reasons = core::norm_rope_reasons(args); !reasons.empty()) {
    throw Error(std::move(reasons));
  }
  args.device.type == DeviceType::cpu ? cpu::norm_rope(args) : cuda::norm_rope(args);
}

}  // namespace dspattn
